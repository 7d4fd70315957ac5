"""What several rooms' tests share: small sweeps on disk, and the command line as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
_OTHERS = re.compile(r"^(RAY|DPSWEEP|MLFLOW|AWS|PG)")

os.environ.setdefault("DPSWEEP_PICTURES", "0")  # no Chromium at the end of each small sweep
torch.set_num_threads(1)  # nets here are tiny; two threads would only wait for each other

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


@pytest.fixture
def sweep_file(tmp_path):
    """A sweep of two short trials; its folder is also where the command line runs."""
    place = tmp_path / "tiny.yaml"
    place.write_text(SWEEP)
    return place


@pytest.fixture
def shell(tmp_path):
    """Given an environment: runs `dpsweep ARGS` in tmp_path, and returns what it printed."""

    def knowing(environment, patience):
        def run(*args, code=0, timeout=patience, **env):
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
    return shell(dict(os.environ), patience=300)


@pytest.fixture(scope="session")
def clean():
    """This process's environment, without what names a cluster or a server."""
    return {k: v for k, v in os.environ.items() if not _OTHERS.match(k)}
