"""Clusters of several nodes on this machine, and sweeps on them that things happen to."""

import sys
import tempfile
from pathlib import Path

import pytest

from dpsweep.cluster.local import Local

sys.path.insert(0, str(Path(__file__).parent))

from ordeals import Sweep


@pytest.fixture(scope="session")
def clean(clean):
    """The same for sweeps whose words are read, and whose figures are not."""
    return {**clean, "DPSWEEP_PICTURES": "0", "COLUMNS": "120"}


@pytest.fixture(scope="session")
def cluster(clean):
    """Three Ray nodes of one CPU each; what a test broke, `whole` mends for the next."""
    with tempfile.TemporaryDirectory(prefix="dpsweep-chaos-") as folder:
        local = Local(Path(folder) / "local")
        try:
            local.prepare(1)
            local.start_nodes(3)
            yield local
        finally:
            Local.at(local.folder).remove()


@pytest.fixture
def whole(cluster):
    """The cluster with all of its three nodes."""
    if not cluster.nodes[0].is_alive:
        cluster.restart_head()
    while sum(node.is_alive for node in cluster.nodes) < 3:
        cluster.add_node()
    return cluster


@pytest.fixture
def sweep(tmp_path, clean):
    """Makes a `Sweep` in tmp_path; a driver that is left at the end is killed."""
    made = []

    def make(environment=None, **how):
        made.append(Sweep(tmp_path, environment or clean, **how))
        return made[-1]

    yield make
    for one in made:
        one.end()
