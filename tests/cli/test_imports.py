"""Which large packages each verb may load: what reads a file or lists sweeps stays instant."""

import os
import re
import subprocess
import sys

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study

LARGE = {
    "torch",
    "ray",
    "mlflow",
    "optuna",
    "sqlalchemy",
    "alembic",
    "sklearn",
    "scipy",
    "numpy",
    "pandas",
    "plotly",
    "torchvision",
    "opacus",
    "dp_accounting",
    "cryptography",
    "requests",
}
STUDY = frozenset({"optuna", "sqlalchemy", "alembic", "numpy"})
"""What reading a study takes; Optuna itself imports NumPy."""

ACCOUNTANT = frozenset({"dp_accounting", "scipy", "numpy"})


def loaded(command, cwd):
    """Large packages that a process has imported, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    imported = re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE)
    assert len(imported) > 20, done.stderr
    return LARGE & {name.partition(".")[0] for name in imported}, done


@pytest.fixture
def launched(tmp_path, sweep_file):
    """A state folder with one sweep, two of whose trials are complete."""
    state = StateFolder(tmp_path / "state")
    sweep, folder = load_sweep(sweep_file), state.sweep("tiny")
    folder.create(sweep.file, sweep.base, None)
    study = Study.create(folder.storage_uri, sweep, folder.id)
    for accuracy in (0.5, 0.6):
        number = study.ask().number
        row = {
            "epoch": 2,
            "step": 22,
            "valid/accuracy": accuracy,
            "valid/loss": 1.0,
            "noise_multiplier": 1.2,
            "privacy/epsilon_spent": 4.0,
            "seconds": 0.5,
        }
        study.report(number, row)
        study.tell(number, "complete")
    return state


@pytest.mark.parametrize(
    "args",
    [
        "--help",
        "space fftkf",
        "schema sweep",
        "schema trial",
        "models",
    ],
)
def test_verbs_that_read_no_study_load_nothing_large(args, tmp_path):
    assert loaded(["-m", "dpsweep", *args.split()], tmp_path)[0] == frozenset()


@pytest.mark.parametrize("verb", ["check", "plan", "launch", "train"])
def test_a_file_that_is_missing_is_told_without_torch(verb, tmp_path):
    found, done = loaded(["-m", "dpsweep", verb, "none.yaml"], tmp_path)
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert not found - (STUDY if verb in ("plan", "launch") else frozenset())


@pytest.mark.parametrize("verb", ["check", "plan"])
def test_a_mistake_in_a_file_is_told_without_torch(verb, tmp_path, sweep_file):
    sweep_file.write_text(sweep_file.read_text().replace("epochs: 2", "epochs: -2"))
    found, done = loaded(["-m", "dpsweep", verb, "tiny.yaml"], tmp_path)
    assert done.returncode == 2
    assert "tiny.yaml:6" in done.stderr
    assert not found - (STUDY if verb == "plan" else frozenset())


def test_a_file_that_was_checked_before_is_checked_without_torch(tmp_path, sweep_file, monkeypatch):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    command = ["-m", "dpsweep", "check", "tiny.yaml"]
    first, once = loaded(command, tmp_path)
    again, twice = loaded(command, tmp_path)
    assert once.returncode == twice.returncode == 0, twice.stderr
    assert "torch" in first, "the model was built, the data read"
    assert again == frozenset()
    assert twice.stdout == once.stdout
    sweep_file.write_text(sweep_file.read_text().replace("width: 4", "width: 5"))
    assert "torch" in loaded(command, tmp_path)[0], "another model"


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        ("status", STUDY),
        ("status tiny", STUDY),
        ("status tiny --json", STUDY),
        ("best tiny --json", STUDY),
        ("best tiny", STUDY | ACCOUNTANT),  # what the search has spent is computed
    ],
)
def test_what_lists_trials_reads_the_study_alone(args, allowed, launched, tmp_path):
    command = ["-m", "dpsweep", *args.split(), "--state", str(launched.root)]
    found, done = loaded(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert found <= allowed


def test_watch_reads_the_study_alone(tmp_path, launched):
    found, _ = loaded(["-c", "import dpsweep.cli.verbs.watch"], tmp_path)
    assert found <= STUDY


def test_a_worker_loads_what_a_trial_needs(tmp_path):
    """Ray Tune itself imports pandas and requests."""
    found, _ = loaded(["-c", "import dpsweep.execution.worker"], tmp_path)
    assert found == {"ray", "torch", "numpy", "pandas", "requests", "cryptography"}
