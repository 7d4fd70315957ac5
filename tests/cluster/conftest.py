"""A laptop with nothing of the cluster's, and a cluster on this machine that ends with the test."""

import tempfile
from pathlib import Path

import pytest

from dpsweep.cluster.local import Local


@pytest.fixture
def laptop(shell, clean):
    """Runs `dpsweep ARGS` in tmp_path, knowing of a cluster only what it is given."""
    return shell(clean)


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
def command_lines():
    """Tells what every process on this machine was called with."""

    def told():
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                yield place.read_text(errors="replace")
            except OSError:
                continue

    return told
