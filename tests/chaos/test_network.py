"""A cable pulled between the driver and a node: a network namespace of the node's own."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from ordeals import tell
from waiting import wait_for

from dpsweep.cluster.processes import start

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Cable:
    """A network namespace, and the one link that leads there."""

    def __init__(self):
        mark = os.getpid()
        self.space, self.near, self.far = f"dpsweep-{mark}", f"dp{mark}a", f"dp{mark}b"
        self.here, self.there = (f"10.77.{mark % 256}.{host}" for host in (1, 2))

    def lay(self):
        ip("netns", "add", self.space)
        ip("link", "add", self.near, "type", "veth", "peer", "name", self.far)
        ip("link", "set", self.far, "netns", self.space)
        ip("addr", "add", f"{self.here}/24", "dev", self.near)
        ip("link", "set", self.near, "up")
        ip("-n", self.space, "addr", "add", f"{self.there}/24", "dev", self.far)
        for link in ("lo", self.far):
            ip("-n", self.space, "link", "set", link, "up")
        ip("-n", self.space, "route", "add", "default", "via", self.here)

    def pull(self):
        ip("link", "set", self.near, "down")

    def plug_in(self):
        ip("link", "set", self.near, "up")

    def remove(self):
        for words in (("link", "del", self.near), ("netns", "del", self.space)):
            with suppress(subprocess.CalledProcessError):
                ip(*words)


@pytest.fixture
def island(whole):
    """The cluster with a fourth node, alone on its own network: (cable, the node's process)."""
    if shutil.which("ip") is None:
        pytest.skip("no iproute2 here: apt-get install iproute2")
    cable = Cable()
    try:
        cable.lay()
    except subprocess.CalledProcessError as e:
        cable.remove()
        pytest.skip(f"no network namespaces here: {e.stderr.strip()}")
    node = start(
        "Ray node on an island",
        [
            *("ip", "netns", "exec", cable.space),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *("--address", f"{cable.here}:{whole.ports['gcs']}"),
            *("--node-ip-address", cable.there, "--num-cpus", "1", "--num-gpus", "0"),
            *("--disable-usage-stats", "--object-store-memory", str(100 * 1024**2)),
            *("--min-worker-port", "0", "--max-worker-port", "0"),
            *("--temp-dir", f"{whole.runtime}/ray-island"),
        ],
        whole.folder / "logs" / "island.log",
        whole.node_environment(),
        cwd=whole.runtime,
    )
    whole.nodes.append(node)
    whole.store()
    try:
        wait_for(lambda: whole.num_alive() == 4, "the island's joining")
        yield cable, node
    finally:
        whole.kill_node(whole.nodes.index(node))
        whole.nodes.remove(node)
        whole.store()
        cable.remove()


def test_a_short_cut_is_waited_for(whole, island, sweep):
    cable, node = island
    it = sweep(environment=whole.node_environment(), epochs=150)
    it.launch("--address", whole.address)
    number = it.wait_for_trial(on=node)
    before = it.trainers(number)
    cable.pull()
    time.sleep(8)
    cable.plug_in()
    began = time.monotonic()
    seconds = it.wait_for_more(number, began)
    assert it.trainers(number) in (before, [])
    it.finish()
    it.check()
    tell("network cut for 8 s", seconds)


def test_a_trial_that_is_cut_off_goes_on_elsewhere_and_is_not_trained_twice(whole, island, sweep):
    cable, node = island
    it = sweep(environment=whole.node_environment(), epochs=150)
    it.launch("--address", whole.address)
    number = it.wait_for_trial(on=node)
    (cut_off,) = it.trainers(number)
    began = time.monotonic()
    cable.pull()
    wait_for(lambda: whole.num_alive() == 3, "the loss of the island")
    lost = time.monotonic() - began
    it.finish()
    it.check()
    assert cut_off not in it.trainers(number)
    tell("network cut for good", time.monotonic() - began, f"(lost after {lost:.1f} s)")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
