"""Machines and drivers that die in the middle of a sweep on three nodes."""

import time

import pytest
from ordeals import freeze, tell
from waiting import CEILING_SECONDS, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def running(whole, sweep):
    """A sweep on the three nodes, and its trial in mid-length on one that is not the head."""

    def start(**how):
        it = sweep(environment=whole.node_environment(), **how)
        it.launch("--address", whole.address)
        number = it.wait_for_trial(on=workers(whole))
        return it, number, node_of(whole, it, number)

    return start


def test_a_trial_whose_node_is_killed_goes_on_on_another(whole, running):
    it, number, node = running()
    began = time.monotonic()
    whole.kill_node(node)
    seconds = it.wait_for_more(number, began)
    it.finish()
    it.check()
    tell("node killed", seconds)


def test_a_trial_whose_nodes_are_killed_twice_goes_on_on_one_that_joined(whole, running):
    it, number, node = running()
    for _ in range(2):
        whole.kill_node(node)
        began = time.monotonic()
        whole.add_node()
        seconds = it.wait_for_more(number, began)
        wait_for(lambda: it.trainers(number) or it.driver.poll() is not None, "a trainer")
        if (node := node_of(whole, it, number)) in (None, 0):
            break  # it went to the head, which is another test's
    it.finish()
    it.check()
    tell("node killed, another added, killed", seconds)


def test_the_trial_of_a_node_that_stands_still_waits_until_nobody_else_can_run_it(whole, running):
    it, number, node = running()
    began = time.monotonic()
    stopped = whole.nodes[node].members()
    freeze(stopped)
    try:
        wait_for(lambda: whole.num_alive() == 2, "the loss of a node")
        lost = time.monotonic() - began
        before = it.num_rows(number)
        time.sleep(20)
        assert it.num_rows(number) == before, "two processes must not run one trial"
    finally:
        whole.kill_node(node)  # the stopped process held the trial's directory until now
    killed = time.monotonic()
    seconds = it.wait_for_more(number, killed)
    it.finish()
    it.check()
    tell("node stands still", seconds, f"(counted as lost after {lost:.1f} s)")


def test_trials_of_a_killed_driver_are_adopted_by_the_next(whole, running):
    it, number, _ = running()
    it.driver.kill()
    it.driver.wait()
    wait_for(lambda: not it.trainers(number), "the end of the driver's workers")
    began = time.monotonic()
    it.resume("--address", whole.address)
    seconds = it.wait_for_more(number, began)
    it.finish()
    assert "to continue" in it.said
    it.check()
    tell("driver killed, resumed", seconds)


def test_a_submitted_sweep_goes_on_after_the_head_was_restarted(whole, sweep, clean):
    it = sweep(environment={**clean, **whole.environment}, name="heads", state=whole.state)
    it.best = whole.state / "best" / "heads.yaml"
    follower = it.start("submit", it.file)
    number = it.wait_for_trial()
    began = time.monotonic()
    whole.restart_head()
    up = time.monotonic() - began
    code = follower.wait(CEILING_SECONDS)
    assert code not in (0, None), it.said
    assert "Traceback" not in it.said, it.said[-4000:]
    it.start("resume", it.name)
    seconds = it.wait_for_more(number, began)
    it.finish()
    assert "to continue" in it.said
    it.check()
    tell("head restarted, resumed", seconds, f"(cluster up again after {up:.1f} s)")


def test_a_driver_whose_head_is_gone_ends_and_says_how_to_go_on(whole, running):
    it, number, _ = running()
    began = time.monotonic()
    whole.restart_head()
    code = it.driver.wait(CEILING_SECONDS)
    ended = time.monotonic() - began
    assert code == 75, it.said
    assert "Traceback" not in it.said, it.said[-4000:]
    wait_for(lambda: not it.trainers(number), "the end of the old cluster's workers")
    began = time.monotonic()
    it.resume("--address", whole.address)
    seconds = it.wait_for_more(number, began)
    it.finish()
    it.check()
    tell("head gone under the driver", seconds, f"(the driver ended after {ended:.1f} s)")


def workers(cluster):
    return Several([node for node in cluster.nodes[1:] if node.is_alive])


class Several:
    """Several nodes, looked at as one."""

    def __init__(self, nodes):
        self.nodes = nodes

    def members(self):
        return [pid for node in self.nodes for pid in node.members()]


def node_of(cluster, sweep, number):
    """Which node trains a trial; None if none does now."""
    pids = set(sweep.trainers(number))
    found = [i for i, node in enumerate(cluster.nodes) if pids & set(node.members())]
    return found[0] if found else None
