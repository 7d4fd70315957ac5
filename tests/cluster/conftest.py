"""A laptop with nothing of the cluster's, and a cluster on this machine that ends with the test."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dpsweep.cluster.local import Local

OTHERS = re.compile(r"^(RAY|DPSWEEP|MLFLOW|AWS|PG)")


@pytest.fixture
def laptop(tmp_path, clean):
    """Runs `dpsweep ARGS` in tmp_path, knowing of a cluster only what it is given."""

    def run(*args, code=0, timeout=400, **env):
        done = subprocess.run(
            [sys.executable, "-m", "dpsweep", *map(str, args)],
            cwd=tmp_path,
            env={**clean, "COLUMNS": "120", **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def local():
    """Where a cluster may be started; what runs there at the end is ended, and its files go."""
    with tempfile.TemporaryDirectory(prefix="dpsweep-up-test-") as folder:
        cluster = Local(Path(folder) / "local")
        try:
            yield cluster
        finally:
            Local.at(cluster.folder).remove()


@pytest.fixture
def clean():
    """This process's environment, without what names a cluster or a server."""
    return {k: v for k, v in os.environ.items() if not OTHERS.match(k)}


@pytest.fixture
def command_lines():
    """Tells what every process on this machine was called with."""

    def told():
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                yield place.read_text(errors="replace")
            except OSError:
                continue

    return told
