"""Which large packages each verb may load: what reads a file or lists sweeps stays instant."""

import json
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


def run_python(cwd, *arguments):
    """Run this Python in a folder, on a screen of known width."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def loaded(command, cwd):
    """Large packages that a process has imported."""
    done = run_python(cwd, "-X", "importtime", *command)
    imported = re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE)
    assert len(imported) > 20, done.stderr
    return LARGE & {name.partition(".")[0] for name in imported}


IN_TURN = """
import contextlib, io, json, sys
large, *commands = map(str.split, sys.argv[1:])
from dpsweep.cli import main
for command in commands:
    sys.argv, code, said = ["dpsweep", *command], 0, io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([[name for name in large if name in sys.modules], code, said.getvalue()]))
"""


def run_in_turn(cwd, *commands):
    """What one process has loaded after each of its commands, its exit code and what it printed.

    Each finds what those before it have loaded: begin with those that may load least.
    """
    done = run_python(cwd, "-c", IN_TURN, " ".join(LARGE), *commands)
    done.check_returncode()
    rows = map(json.loads, done.stdout.splitlines())
    return [
        (command, frozenset(row[0]), *row[1:]) for command, row in zip(commands, rows, strict=True)
    ]


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


def test_verbs_that_read_no_study_load_nothing_large(tmp_path, sweep_file):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(sweep_file.read_text().replace("epochs: 2", "epochs: -2"))
    fine = ("--help", "space fftkf", "schema sweep", "schema trial", "models")
    for command, found, code, said in run_in_turn(tmp_path, *fine):
        assert (found, code) == (frozenset(), 0), (command, said)
    mistakes = {
        "check none.yaml": "no such file",
        "train none.yaml": "no such file",
        "check wrong.yaml": "wrong.yaml:6",
        "plan none.yaml": "no such file",
        "launch none.yaml": "no such file",
        "plan wrong.yaml": "wrong.yaml:6",
    }
    for command, found, code, said in run_in_turn(tmp_path, *mistakes):
        assert code == 2, command
        assert mistakes[command] in said
        reads_a_study = command.startswith(("plan", "launch"))
        assert found <= (STUDY if reads_a_study else frozenset()), command


def test_a_file_that_was_checked_before_is_checked_without_torch(
    tmp_path, sweep_file, verb, monkeypatch
):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    # An epsilon of its own: noise that this process has calibrated before is not cached on disk.
    sweep_file.write_text(sweep_file.read_text().replace("epsilon: 4", "epsilon: 3.7315"))
    first = verb("check", sweep_file.name)
    other = tmp_path / "other.yaml"
    other.write_text(sweep_file.read_text().replace("width: 4", "width: 5"))
    again, another = run_in_turn(tmp_path, "check tiny.yaml", "check other.yaml")
    assert again[1:] == (frozenset(), 0, first)
    assert another[2] == 0, another
    assert "torch" in another[1], "another model was built, the data read"


def test_what_lists_trials_reads_the_study_alone(launched, tmp_path):
    verbs = ["status", "status tiny", "status tiny --json", "best tiny --json", "best tiny"]
    for command, found, code, said in run_in_turn(
        tmp_path, *(f"{verb} --state {launched.root}" for verb in verbs)
    ):
        assert code == 0, said
        # `best` in words computes what the search has spent
        allowed = STUDY | ACCOUNTANT if command.startswith("best tiny --state") else STUDY
        assert found <= allowed, command


def test_watch_reads_the_study_alone(tmp_path, launched):
    found = loaded(["-c", "import dpsweep.cli.verbs.watch"], tmp_path)
    assert found <= STUDY


def test_a_worker_loads_what_a_trial_needs(tmp_path):
    """Ray Tune itself imports pandas and requests."""
    found = loaded(["-c", "import dpsweep.execution.worker"], tmp_path)
    assert found == {"ray", "torch", "numpy", "pandas", "requests", "cryptography"}
