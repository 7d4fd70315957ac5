"""A sweep that has run, made without Ray; and Python as a user runs it."""

import os
import subprocess
import sys

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir


@pytest.fixture
def make_sweep(tmp_path, sweep_file):
    """Makes a sweep of two trials that were really trained, in tmp_path/state."""

    def make(*settings, void=False):
        state, sweep = (
            StateFolder.at(str(tmp_path / "state")),
            load_sweep(sweep_file, list(settings)),
        )
        folder = state.sweep(sweep.name)
        folder.create(sweep.file, sweep.base, None)
        study = Study.create(folder.storage_uri, sweep, folder.id)
        for _ in range(sweep.config.budget.trials):
            record = study.dispatch(study.ask(), void=void)
            trial_dir = TrialDir(folder.trial_dir(record.number))
            trial_dir.make_secret()
            train(record.config, trial_dir, lambda row, n=record.number: study.report(n, row))
            trial_dir.forget()
            study.tell(record.number, "complete")
        return sweep.name, str(state.root)

    return make


@pytest.fixture
def python(tmp_path):
    """Runs a program in tmp_path, as a process of its own."""

    def run(text, **env):
        return subprocess.Popen(
            [sys.executable, "-u", "-c", text],
            cwd=tmp_path,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run
