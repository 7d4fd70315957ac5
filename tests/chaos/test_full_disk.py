"""One node's own disk is full: that of its Ray, not that of the state folder."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ordeals import tell

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def small_node(whole):
    """A node whose temporary files have 40 MB; mounting takes rights that not everybody has."""
    place = Path(whole.runtime) / f"ray-{len(whole.nodes)}"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield whole.add_node(), place
    finally:
        whole.kill_node(len(whole.nodes) - 1)
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_node_whose_own_disk_is_full_loses_no_trial_and_no_worker_for_long(
    whole, small_node, sweep
):
    node, place = small_node
    it = sweep(environment=whole.node_environment(), trials=8)
    it.launch("--address", whole.address)
    number = it.wait_for_trial(on=node)
    began = time.monotonic()
    subprocess.run(["dd", "if=/dev/zero", f"of={place}/fill"], capture_output=True, check=False)
    it.wait_for_more(number, began)  # what it runs already writes nothing there
    (worker,) = it.trainers(number)
    began = time.monotonic()
    os.kill(worker, signal.SIGKILL)  # a new one has to be started, there or elsewhere
    seconds = it.wait_for_more(number, began)
    it.finish()
    it.check()
    tell("a node's own disk full, and its worker killed", seconds)
