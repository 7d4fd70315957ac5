"""Fixtures of several packages: small sweeps on disk, and the command line as a user runs it."""

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))  # in any import mode of pytest

from waiting import CEILING_SECONDS  # noqa: E402 - it lies there

_OTHERS = re.compile(r"^(RAY|DPSWEEP|MLFLOW|AWS|PG)")

os.environ.setdefault("DPSWEEP_PICTURES", "0")  # no Chromium at the end of each small sweep
# Nets here are tiny, and two threads would only wait for each other. By the environment, as to
# import torch here would cost the process that only hands out the tests its seconds too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray gives its workers niceness 15: beside other work they need minutes to import torch.
os.environ.setdefault("RAY_worker_niceness", "0")

# One cache a run of the tests: what another version of the code computed is never read.
_MADE_CACHE = "DPSWEEP_CACHE" not in os.environ
if _MADE_CACHE:
    os.environ["DPSWEEP_CACHE"] = tempfile.mkdtemp(prefix="dpsweep-tests-")

SWEEP = """\
name: tiny
base:
  data: {name: digits}
  model: {name: cnn_small, width: 4}
  privacy: {epsilon: 4}
  train: {batch_size: 128, epochs: 2}
  optimizer: {lr: 1.0}
  method: {name: fftkf}
search:
  method.kappa: {uniform: [0.3, 1.0]}
  optimizer.lr: {log_uniform: [0.3, 3]}
sampler: {name: random}
budget: {trials: 2}
"""


gc.disable()  # while a gigabyte is imported, of which nothing is garbage: 7 s a process


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """What was imported stays; to look through it at every collection takes longer than tests."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    """Let the interpreter clear up, or triton's bindings complain of leaks."""
    gc.unfreeze()
    if _MADE_CACHE:
        shutil.rmtree(os.environ["DPSWEEP_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _migrations_are_read_once():
    """Optuna reads its migrations three times for a new database, which takes longer than a test.

    They are files of its package; none of what they say depends on the database.
    """
    if "optuna" not in sys.modules:
        yield
        return
    from optuna.storages._rdb.storage import _VersionManager

    read, kept = _VersionManager._create_alembic_script, []

    def once(self):
        if not kept:
            kept.append(read(self))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_VersionManager, "_create_alembic_script", once)
        yield


def pytest_runtest_setup(item):
    """Give each test the same draws from torch's own generator, whatever ran before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def sweep_file(tmp_path):
    """A sweep of two short trials; its folder is also where the command line runs."""
    place = tmp_path / "tiny.yaml"
    place.write_text(SWEEP)
    return place


@pytest.fixture
def shell(tmp_path):
    """Given an environment: runs `dpsweep ARGS` in tmp_path, and returns what it printed."""

    def knowing(environment):
        def run(*args, code=0, timeout=CEILING_SECONDS, **env):
            done = subprocess.run(
                [sys.executable, "-m", "dpsweep", *map(str, args)],
                cwd=tmp_path,
                env={**environment, "COLUMNS": "120", **env},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout + done.stderr

        return run

    return knowing


@pytest.fixture
def dpsweep(shell):
    """Runs `dpsweep ARGS` in tmp_path, as a process of its own; returns what it printed."""
    return shell(dict(os.environ))


@pytest.fixture
def verb(tmp_path, monkeypatch, capfd):
    """Runs `dpsweep ARGS` in tmp_path, in this process; returns what it printed.

    A process of its own spends its first seconds on imports: those are for verbs that run a sweep.
    """
    from dpsweep.cli import main

    def run(*args, code=0, **env):
        ended = 0
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", ["dpsweep", *map(str, args)])
            for name, value in {"COLUMNS": "120", **env}.items():
                patch.setenv(name, value)
            capfd.readouterr()
            try:
                main()
            except SystemExit as e:
                ended = e.code or 0
        said = "".join(capfd.readouterr())
        assert ended == code, said
        return said

    return run


@pytest.fixture(scope="session")
def clean():
    """This process's environment, without what names a cluster or a server."""
    return {k: v for k, v in os.environ.items() if not _OTHERS.match(k)}


@pytest.fixture
def uri(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def search(tmp_path):
    """Runs `trials` trials of a sweep one at a time; a trial's accuracy is `judge(record)`.

    With `reopen`, each is asked for by a study that was just opened.
    """
    from dpsweep.store.study import Study

    def run(sweep, trials, judge, *, name="study", reopen=False):
        uri = f"sqlite:///{tmp_path}/{name}.db"
        study = Study.create(uri, sweep)
        for _ in range(trials):
            study = Study.open(uri, sweep) if reopen else study
            finish(study, study.ask(), judge)
        return study

    return run


def finish(study, record, judge):
    """Reports a made-up result of a running trial, and ends it."""
    row = {
        "epoch": 1,
        "step": 11,
        "valid/accuracy": judge(record),
        "valid/loss": 1.0,
        "noise_multiplier": 1.2,
        "privacy/epsilon_spent": 1.0,
        "seconds": 0.5,
    }
    study.report(record.number, row)
    if study.sweep.config.pruner.name != "none":
        study.should_prune(record.number)  # notes the rung that the trial has reached
    return study.tell(record.number, "complete")


@pytest.fixture(scope="session")
def really_trained():
    """Given a sweep and its state: launches it, and trains its first trial; study and folder."""
    from dpsweep.store.study import Study
    from dpsweep.training.loop import train
    from dpsweep.training.trial_dir import TrialDir

    def made(sweep, state, *, void=False):
        folder = state.sweep(sweep.name)
        folder.create(sweep.file, sweep.base, None)
        study = Study.create(folder.storage_uri, sweep, folder.id)
        record = study.dispatch(study.ask(), void=void)
        trial_dir = TrialDir(folder.trial_dir(record.number))
        trial_dir.make_secret()
        train(record.config, trial_dir, lambda row: study.report(record.number, row))
        trial_dir.forget()
        study.tell(record.number, "complete")
        return study, folder

    return made


@pytest.fixture
def study_of(tmp_path, sweep_file):
    """A study whose trials came to the given results, at two epochs each.

    A result is an accuracy, None for a failed trial, or ("pruned", accuracy). `repeats` are the
    accuracies of the repeats that confirm trials, in the order in which they are asked for.
    """
    from dpsweep.config.sweep import load_sweep
    from dpsweep.store.study import Study

    def make(results, *settings, repeats=(), reason="it broke", name="study"):
        sweep = load_sweep(sweep_file, [f"budget.trials={max(1, len(results))}", *settings])
        study = Study.create(f"sqlite:///{tmp_path}/{name}.db", sweep)
        for result in results:
            end(study, study.ask(), result, reason)
        for result in repeats:
            end(study, study.ask_to_confirm(), result, reason)
        return study

    return make


def end(study, asked, result, reason):
    how, value = result if isinstance(result, tuple) else ("complete", result)
    if value is None:
        study.tell(asked.number, "failed", reason=reason)
        return
    for epoch in (1, 2):
        row = {
            "epoch": epoch,
            "step": 11 * epoch,
            "valid/accuracy": value - 0.1 * (2 - epoch),
            "valid/loss": 1 - value,
            "privacy/epsilon_spent": 3.99,
            "noise_multiplier": 1.07,
            "seconds": 10 * value,
        }
        study.report(asked.number, row)
    study.tell(asked.number, how)


@pytest.fixture(scope="module")
def postgres():
    """A PostgreSQL server of our own; its URL, with the password in it."""
    pytest.importorskip("psycopg", reason="the driver is not there: pip install 'psycopg[binary]'")
    from postgres import postgres_server

    with postgres_server() as url:
        yield url
