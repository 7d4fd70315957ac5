"""A laptop with nothing of the cluster's, and a cluster on this machine that ends with the test."""

import sys
import tempfile
from pathlib import Path

import pytest
import servers

from dpsweep.cluster.local import Local

sys.path.insert(0, str(Path(__file__).parent))  # so that files here import one another


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
    return servers.command_lines
