"""A sweep that something happens to: started, looked at while it runs, and judged at its end.

`Sweep.check` says what must be true of every sweep, whatever happened: each trial is once in the
study and once in MLflow, with all of its epochs, ended, and charged once; the best config is
exported; no secret is left, none was replaced, and nobody trains any more.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from pathlib import Path

import optuna
from waiting import CEILING_SECONDS, wait_for

from dpsweep.config.source import read_yaml
from dpsweep.config.trial import load_trial
from dpsweep.search.charge import make_ledger_entry
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import open_study
from dpsweep.tracking.mlflow import ID_TAG, SWEEP_TAG, TRIAL_TAG
from dpsweep.tracking.spool import read_backlog
from dpsweep.training.trial_dir import TrialDir

FILE = """\
name: {name}
base:
  data: {{name: digits}}
  model: {{name: cnn_small, width: 4}}
  privacy: {{epsilon: 4}}
  train: {{batch_size: 128, epochs: {epochs}, evaluate_every: {every}}}
  optimizer: {{lr: 1.0}}
  method: {{name: dp_sgd}}
search:
  optimizer.lr: {{log_uniform: [0.3, 3]}}
sampler: {{name: random}}
budget: {{trials: {trials}}}
"""
_ENDS = {"complete": "FINISHED", "pruned": "FINISHED", "failed": "FAILED"}


class Sweep:
    """One sweep, its driver, and what was seen of it.

    Args:
        folder: Where its file, its state folder and its best config are.
        environment: Of its drivers.
        name: The sweep's.
        trials: How many.
        epochs: Of each.
        every: Epochs between reports.
        state: Its state folder, if not one in `folder`.
    """

    def __init__(
        self, folder, environment, *, name="chaos", trials=4, epochs=100, every=5, state=None
    ):
        self.folder, self.environment = folder, dict(environment)
        self.name, self.trials, self.epochs, self.every = name, trials, epochs, every
        self.state = StateFolder(state or folder / ".dpsweep")
        self.file, self.best = folder / f"{name}.yaml", folder / "best.yaml"
        self.file.write_text(FILE.format(name=name, epochs=epochs, every=every, trials=trials))
        self.driver = None
        self.secrets = Secrets(self.trial_dirs)

    @property
    def trial_dirs(self):
        return self.state.root / "sweeps" / self.name / "trials"

    @property
    def said(self):
        """All that its drivers printed."""
        place = self.folder / "said.txt"
        return place.read_text() if place.exists() else ""

    def launch(self, *options, **environment):
        return self.start("launch", self.file, "-o", self.best, *options, **environment)

    def resume(self, *options, **environment):
        return self.start("resume", self.name, "-o", self.best, *options, **environment)

    def start(self, *words, **environment):
        """A driver in a process of its own."""
        elsewhere = "DPSWEEP_TO" in self.environment  # the cluster knows its own state folder
        state = () if elsewhere else ("--state", self.state.root)
        with (self.folder / "said.txt").open("a") as out:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "dpsweep", *map(str, (*words, *state))],
                cwd=self.folder,
                env={**self.environment, **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        return self.driver

    def finish(self, code=0):
        """Waits for the driver's end."""
        assert self.driver.wait(CEILING_SECONDS) == code, self.said[-4000:]
        assert "Traceback" not in self.said, self.said[-4000:]

    def end(self):
        """Leaves nothing running."""
        self.secrets.stop()
        if self.driver and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()

    def num_rows(self, number):
        """Reports of a trial so far."""
        return (
            len(TrialDir(self.trial_dirs / f"{number:04d}").rows())
            if self.trial_dirs.exists()
            else 0
        )

    def running(self):
        """Trials that have reported, are some reports from their end, and are being trained."""
        last = self.epochs // self.every - 4
        known = [int(place.name) for place in self.trial_dirs.glob("[0-9]*")]
        return [n for n in sorted(known) if 2 <= self.num_rows(n) < last and self.trainers(n)]

    def trainers(self, number):
        """Processes in whose hands a trial's directory is."""
        return holders(self.trial_dirs / f"{number:04d}")

    def wait_for_trial(self, on=None):
        """A trial that runs in the middle of its length; one of node `on`, if that is given.

        `on` is a process (cluster/processes.py).
        """

        def found():
            members = set(on.members()) if on else None
            return [n for n in self.running() if not members or members & set(self.trainers(n))]

        wait_for(lambda: found() or self.driver.poll() is not None, "a running trial")
        assert found(), f"the sweep ended before anything could happen to it:\n{self.said[-4000:]}"
        return found()[0]

    def wait_for_more(self, number, since):
        """Until a trial has reported again; seconds from `since` to then."""
        before = self.num_rows(number)
        ended = self.driver.poll

        def more():
            return self.num_rows(number) > before

        wait_for(lambda: more() or ended() is not None, f"a report of {number}")
        assert more(), f"the driver ended:\n{self.said[-4000:]}"
        return time.monotonic() - since

    def wait_for_delivery(self, since):
        """Until the tracking server has all that was said so far; seconds from `since` to then."""
        folder = self.state.sweep(self.name).path
        wait_for(lambda: read_backlog(folder).waiting == 0, "the delivery of results")
        return time.monotonic() - since

    def check(self, tracking=None, ends=("complete",)):
        """What must be true at the end; see the head of this file."""
        self.secrets.stop()
        study = open_study(self.name, self.state)
        records, folder = study.records(), self.state.sweep(self.name)
        assert [record.number for record in records] == list(range(self.trials))
        assert {record.state for record in records} <= set(ends), [
            (record.number, record.state, record.reason) for record in records
        ]
        assert all(record.charged == make_ledger_entry(record.config) for record in records)
        assert not any(record.void for record in records)
        full = list(range(self.every, self.epochs + 1, self.every))
        stored = optuna.load_study(study_name=folder.study, storage=study._storage).get_trials()
        for record in records:
            expected = full if record.state == "complete" else full[: self.num_rows(record.number)]
            trial_dir = TrialDir(self.trial_dirs / f"{record.number:04d}")
            assert [row["epoch"] for row in trial_dir.rows()] == expected, record.number
            assert sorted(stored[record.number].intermediate_values) == expected, record.number
        self._check_tracking(tracking or self.state.tracking_uri, folder.id, records)
        exported = load_trial(read_yaml(self.best))
        assert exported == study.best()[0].config
        study._storage._backend.engine.dispose()  # a connection left open is a warning at the end
        self._check_private()

    def _check_tracking(self, uri, sweep_id, records):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow import MlflowClient

            client = MlflowClient(uri)
            experiments = [e.experiment_id for e in client.search_experiments()]
            runs = client.search_runs(
                experiments, f"tags.`{ID_TAG}` = '{sweep_id}'", max_results=1000
            )
            (parent,) = [run for run in runs if SWEEP_TAG in run.data.tags]
            assert parent.info.status == "FINISHED"
            trials = [run for run in runs if TRIAL_TAG in run.data.tags]
            assert len(runs) == 1 + len(trials)
            numbered = {int(run.data.tags[TRIAL_TAG].rpartition("/")[2]): run for run in trials}
            assert len(trials) == len(numbered) == len(records)
            for record in records:
                run = numbered[record.number]
                assert run.info.status == _ENDS[record.state], record.number
                assert run.data.tags["dpsweep.state"] == record.state
                history = client.get_metric_history(run.info.run_id, "valid/accuracy")
                rows = TrialDir(self.trial_dirs / f"{record.number:04d}").rows()
                expected = [row["step"] for row in rows]  # the optimizer's, not epochs
                if record.state != "complete":
                    expected = expected[: len(history)]
                assert [metric.step for metric in history] == expected, record.number
            artifacts = [a.path for a in client.list_artifacts(parent.info.run_id)]
            assert any(path.endswith(".yaml") for path in artifacts), artifacts
        folder = self.state.sweep(self.name).path
        assert not (folder / "spool.refused.jsonl").exists()
        assert (folder / "spool.jsonl").stat().st_size == 0

    def _check_private(self):
        assert self.secrets.seen, "no trial was looked at while it ran"
        replaced = {n: len(digests) for n, digests in self.secrets.seen.items() if len(digests) > 1}
        assert not replaced, "a trial's secret was replaced: its privacy is spent twice"
        for name in ("secret", "checkpoint.pt"):
            assert not list(self.trial_dirs.glob(f"*/{name}"))
        wait_for(
            lambda: not any(holders(place) for place in self.trial_dirs.iterdir()),
            "the end of all who train",
        )


class Secrets:
    """Looks at every trial's secret again and again while a sweep runs; keeps digests alone."""

    def __init__(self, trial_dirs):
        self.trial_dirs, self.seen = trial_dirs, defaultdict(set)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self):
        self._over.set()
        self._thread.join()

    def _look(self):
        while not self._over.wait(0.1):
            for place in self.trial_dirs.glob("*/secret"):
                with contextlib.suppress(FileNotFoundError):
                    digest = hashlib.sha256(place.read_bytes()).hexdigest()
                    self.seen[int(place.parent.name)].add(digest)


def holders(trial_dir):
    """Ray's workers that have a trial's directory open: they train there."""
    found, wanted = set(), str(trial_dir)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text().startswith("ray::"):
                links = (os.readlink(link) for link in (process / "fd").iterdir())
                found |= {int(process.name)} if wanted in links else set()
    return sorted(found)


def freeze(pids, how=signal.SIGSTOP):
    """Stops processes for a while, or (SIGCONT) lets them go on."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)


def tell(fault, seconds, words=""):
    """For docs/benchmarks/reliability.md: `pytest -s` shows it."""
    print(f"\nCHAOS {fault}: {seconds:.1f} s {words}", flush=True)
