"""A sweep that is killed at any moment goes on as if it had not been."""

import contextlib
import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.ray

SECRET = {"DPSWEEP_TEST_SECRET": "kills"}
SWEEP = """\
name: killed
base:
  data: {name: digits}
  model: {name: cnn_small, width: 8}
  privacy: {epsilon: 4}
  train: {batch_size: 128, epochs: 12, evaluate_every: 2}
  optimizer: {lr: 1.0}
  method: {name: disk}
search:
  method.kappa: {uniform: [0.3, 1.0]}
  optimizer.lr: {log_uniform: [0.3, 3]}
pruner: {name: median, warmup_epochs: 4}
sampler: {name: tpe, startup_trials: 3}
keep_weights: 99
"""


@pytest.fixture
def killed(tmp_path):
    (tmp_path / "killed.yaml").write_text(SWEEP)
    return Killed(tmp_path)


class Killed:
    """A sweep whose processes are killed, and what must be true of it at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / ".dpsweep"
        self.trial_dirs = self.state / "sweeps/killed/trials"

    def start(self, trials: int) -> subprocess.Popen:
        known = (self.state / "sweeps/killed/sweep.json").exists()
        what = ["resume", "killed"] if known else ["launch", "killed.yaml"]
        settings = [] if known else ["--set", f"budget.trials={trials}"]
        with (self.folder / "out.txt").open("a") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "dpsweep", *what, *settings],
                cwd=self.folder,
                env={**os.environ, **SECRET},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def finished(self) -> dict[int, tuple[str, str]]:
        """State and weights of the trials that the study holds for finished."""
        if not (self.state / "study.db").exists():
            return {}
        with sqlite3.connect(self.state / "study.db", timeout=60) as db:
            rows = db.execute(
                "select number, state from trials where state in ('COMPLETE', 'PRUNED', 'FAIL')"
            ).fetchall()
        return {number: (state, self.weights(number)) for number, state in rows}

    def weights(self, number: int) -> str:
        place = self.trial_dirs / f"{number:04d}/weights.pt"
        return hashlib.sha256(place.read_bytes()).hexdigest() if place.exists() else ""

    def check(self, trials: int) -> None:
        told = json.loads(self.run("status", "killed", "--json"))
        assert [t["trial"] for t in told] == list(range(trials))
        assert {t["state"] for t in told} <= {"complete", "pruned"}, told
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow import MlflowClient

            client = MlflowClient(f"sqlite:///{self.state}/mlflow.db")
            experiment = client.get_experiment_by_name("killed").experiment_id
            runs = client.search_runs([experiment], max_results=500)
            names = sorted(label(run) for run in runs)
            assert names == ["killed", *(f"trial-{i:04d}" for i in range(trials))]
            for run in runs:
                if run.info.run_name == "killed":
                    assert run.info.status == "FINISHED"
                    continue
                trial = told[int(label(run)[-4:])]
                ended = {"complete": "FINISHED", "pruned": "KILLED"}[trial["state"]]
                assert run.info.status == ended, run.info.run_name
                steps = [
                    m.step for m in client.get_metric_history(run.info.run_id, "valid/accuracy")
                ]
                assert steps == list(range(2, int(trial["epoch"]) + 1, 2)), run.info.run_name
        for name in ("secret", "checkpoint.pt"):
            assert not list(self.trial_dirs.glob(f"*/{name}"))

    def check_weights(self, number: int) -> None:
        """Those of a trial that nobody disturbed, bit for bit."""
        config = next((self.folder / "all").glob(f"*trial-{number:04d}.yaml"))
        self.run("train", config, "-q", "-o", f"again-{number}")
        one = torch.load(self.trial_dirs / f"{number:04d}/weights.pt", weights_only=True)
        two = torch.load(self.folder / f"again-{number}/weights.pt", weights_only=True)
        assert all(torch.equal(one[k], two[k]) for k in one)

    def run(self, *args) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "dpsweep", *map(str, args)],
            cwd=self.folder,
            env={**os.environ, **SECRET},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def workers_of(driver: subprocess.Popen) -> list[int]:
    """Ids of the Ray workers under a driver."""
    table = subprocess.run(
        ["ps", "-eo", "pid,ppid,args", "--no-headers"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rows = [line.split(None, 2) for line in table]
    family = {driver.pid}
    for _ in range(4):
        family |= {int(pid) for pid, parent, _ in rows if int(parent) in family}
    return [int(pid) for pid, _, args in rows if int(pid) in family and "ray::" in args]


def unchanged(before: dict, after: dict) -> bool:
    """True if no finished trial ended otherwise later; weights of the lesser ones may go."""
    return all(
        after[number][0] == state and after[number][1] in (weights, "")
        for number, (state, weights) in before.items()
    )


def kill(driver: subprocess.Popen, what: str, rng: random.Random) -> None:
    if what in ("worker", "both"):
        for pid in rng.sample(found := workers_of(driver), min(1, len(found))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if what in ("driver", "both"):
        driver.kill()
        driver.wait()


def test_a_sweep_whose_driver_and_worker_are_killed_ends_as_if_they_were_not(killed):
    _through_kills(killed, trials=3, kills=["worker", "both"], seed=0, compared=1)


@pytest.mark.slow
def test_a_sweep_killed_at_25_random_moments_ends_as_if_it_was_not(killed):
    rng = random.Random(os.environ.get("DPSWEEP_KILL_SEED", "25"))
    kills = [rng.choice(["driver", "driver", "worker", "both"]) for _ in range(25)]
    _through_kills(killed, trials=40, kills=kills, seed=rng.random(), compared=3)


def _through_kills(
    killed: Killed, trials: int, kills: list[str], seed: float, compared: int
) -> None:
    rng, driver, before = random.Random(seed), killed.start(trials), {}
    for what in kills:
        wait_for_workers(driver)
        time.sleep(rng.uniform(0, 3))
        assert driver.poll() is None, "the sweep ended before it was killed often enough"
        kill(driver, what, rng)
        if driver.poll() is not None:
            after = killed.finished()
            assert unchanged(before, after), "a finished trial was run again"
            before, driver = after, killed.start(trials)
    assert driver.wait(400) == 0, (killed.folder / "out.txt").read_text()[-4000:]
    assert unchanged(before, killed.finished()), "a finished trial was run again"
    killed.check(trials)
    best = json.loads(killed.run("best", "killed", "--top", "99", "--json"))
    killed.run("export", "killed", "--top", "99", "-o", "all")
    for trial in rng.sample(best, min(compared, len(best))):
        killed.check_weights(trial["trial"])


def wait_for_workers(driver: subprocess.Popen) -> None:
    """Until a trial runs; or, now and then, only until the driver has begun."""
    end = time.monotonic() + 120
    while time.monotonic() < end and driver.poll() is None and not training(driver):
        time.sleep(0.1)


def training(driver: subprocess.Popen) -> bool:
    table = subprocess.run(
        ["ps", "-eo", "pid,args", "--no-headers"], capture_output=True, text=True, check=True
    ).stdout
    workers = set(workers_of(driver))
    return any(
        int(line.split(None, 1)[0]) in workers and "ImplicitFunc" in line
        for line in table.splitlines()
    )


def label(run):
    """A run's name without what is told of its config: trial-0007, or the sweep's name."""
    tag = run.data.tags.get("dpsweep.trial")
    return f"trial-{int(tag.rpartition('/')[2]):04d}" if tag else run.info.run_name
