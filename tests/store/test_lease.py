"""A sweep has one driver, on one machine or on several, and a dead one's place is taken."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import wait_for

from dpsweep.core.errors import StateError
from dpsweep.store import lease
from dpsweep.store.lease import LeaseTiming, find_lease_holder, hold_lease, read_last_holder

PACE = LeaseTiming(beat_seconds=0.1, silent_seconds=60.0, settle_seconds=0.1)
"""Beats are waited for; how long a lease was silent is told by its file's age, which tests set."""

DRIVER = """
import os, sys
from pathlib import Path
from dpsweep.store import lease
if sys.argv[2] == "elsewhere":  # a machine whose locks ours does not see
    lease.get_machine_id = lambda: f"machine {os.getpid()}"
    lease.fcntl.flock = lambda *_: None
with lease.hold_lease(Path(sys.argv[1]), lease.LeaseTiming(0.1, 60.0, 0.1)) as mine:
    print("held", flush=True)
    for line in sys.stdin:
        print("lost" if mine.is_lost() else "mine", flush=True)
"""


class Driver:
    """A process that drives a sweep, and says on demand whether it still may."""

    def __init__(self, folder, where, **options):
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        self.pid = self.process.pid

    def holds(self):
        """True once it holds the lease, False once it has ended without."""
        return self.process.stdout.readline() == "held\n"

    def says(self):
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def suspend(self):
        os.kill(self.pid, signal.SIGSTOP)
        wait_for(self.is_suspended, "the end of its threads' work", self.process)

    def is_suspended(self):
        states = [p.read_text() for p in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return all(text.rpartition(")")[2].split()[0] == "T" for text in states)

    def wake(self):
        os.kill(self.pid, signal.SIGCONT)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def drive(tmp_path):
    started = []

    def start(where="here"):
        started.append(Driver(tmp_path, where))
        assert started[-1].holds()
        return started[-1]

    yield start
    for driver in started:
        driver.end()


def take(folder, pace=PACE):
    with hold_lease(folder, pace) as mine:
        return mine.taken_over


def age(folder, seconds):
    """Makes the lease older, as if its owner had been silent for so long."""
    beaten = (folder / "lease").stat().st_mtime
    os.utime(folder / "lease", (beaten - seconds, beaten - seconds))


def wait_for_beat(folder):
    """Until the lease is renewed."""
    before = (folder / "lease").stat().st_mtime_ns
    wait_for(lambda: (folder / "lease").stat().st_mtime_ns > before, "a beat")


def test_a_killed_driver_of_this_machine_is_succeeded_at_once(tmp_path, drive):
    driver = drive()
    assert find_lease_holder(tmp_path, PACE).pid == driver.pid
    driver.end()
    assert find_lease_holder(tmp_path, PACE) is None
    said = take(tmp_path, LeaseTiming(silent_seconds=1000))
    assert re.fullmatch(rf"taken over from process {driver.pid} on \S+, silent for \d+ s", said)
    assert take(tmp_path) is None, "a driver that ended in good order leaves nothing to take over"


def test_a_driver_elsewhere_is_believed_as_long_as_its_beat_is_fresh(tmp_path, drive):
    driver = drive("elsewhere")
    age(tmp_path, 1000)
    wait_for_beat(tmp_path)  # however long it is, it does beat
    assert find_lease_holder(tmp_path, PACE).pid == driver.pid
    words = rf"driven by process {driver.pid} on .*try again in \d+ s.*dpsweep stop"
    with pytest.raises(StateError, match=words):
        take(tmp_path)
    driver.end()
    with pytest.raises(StateError, match=r"try again in (60|[1-5]?\d) s"):
        take(tmp_path)
    age(tmp_path, PACE.silent_seconds)
    assert find_lease_holder(tmp_path, PACE) is None
    assert f"taken over from process {driver.pid} on" in take(tmp_path)


def test_who_waits_succeeds_a_driver_elsewhere_once_it_is_silent(tmp_path, drive, caplog):
    driver = drive("elsewhere")
    with pytest.raises(StateError, match="is being driven by"), hold_lease(tmp_path, PACE, 1.5):
        pass
    assert find_lease_holder(tmp_path, PACE).pid == driver.pid, "it was alive all the time"
    driver.end()
    caplog.clear()
    with hold_lease(tmp_path, replace(PACE, silent_seconds=3.0), 60) as mine:
        assert f"taken over from process {driver.pid} on" in mine.taken_over
    (said,) = caplog.messages
    assert said.endswith("Waiting for it, up to 60 s")


def test_the_clock_of_the_other_machine_does_not_matter(tmp_path, drive):
    driver = drive("elsewhere")
    driver.end()
    stored = json.loads((tmp_path / "lease").read_text())
    (tmp_path / "lease").write_text(json.dumps({**stored, "beat": stored["beat"] + 7200}))
    age(tmp_path, 100)
    assert re.search(r"silent for 1\d\d s", take(tmp_path))


def test_a_driver_that_slept_too_long_learns_that_it_was_succeeded(tmp_path, drive):
    driver = drive("elsewhere")
    assert driver.says() == "mine"
    driver.suspend()
    age(tmp_path, PACE.silent_seconds)
    with hold_lease(tmp_path, PACE) as mine:
        driver.wake()
        wait_for(lambda: driver.says() == "lost", "the loss")
        wait_for_beat(tmp_path)  # the successor still renews it
        assert not mine.is_lost()
        assert read_last_holder(tmp_path).pid == os.getpid()
    assert driver.says() == "lost", "and it does not come back when the place is free again"


def test_a_driver_that_slept_unnoticed_goes_on(tmp_path, drive):
    driver = drive()
    driver.suspend()
    age(tmp_path, PACE.silent_seconds)
    with pytest.raises(StateError, match=rf"is being driven by process {driver.pid}"):
        take(tmp_path)
    driver.wake()
    assert driver.says() == "mine"


def test_a_suspended_driver_is_told_from_a_busy_one(tmp_path, drive, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_TIMING", PACE)
    driver = drive()
    driver.suspend()
    age(tmp_path, PACE.silent_seconds + 1)
    with pytest.raises(
        StateError, match=rf"may be suspended: wake it with kill -CONT {driver.pid}"
    ):
        take(tmp_path)
    driver.wake()


def test_a_lost_lease_says_so_before_anything_is_written(tmp_path):
    with hold_lease(tmp_path, LeaseTiming(beat_seconds=0.05)) as mine:
        mine.check()
        (tmp_path / "lease").unlink()
        wait_for(mine.is_lost, "the loss")
        with pytest.raises(StateError, match=r"another process drives .* writes nothing more"):
            mine.check()


def test_is_lost_looks_itself_if_the_thread_did_not(tmp_path, monkeypatch):
    hour = 3600.0
    with hold_lease(tmp_path, LeaseTiming(beat_seconds=hour)) as mine:
        (tmp_path / "lease").write_text((tmp_path / "lease").read_text().replace("a", "b"))
        assert not mine.is_lost(), "confirmed a moment ago"
        now = lease._read_clock()
        monkeypatch.setattr(lease, "_read_clock", lambda: now + 3 * hour)
        assert mine.is_lost()


def test_of_several_who_take_over_at_once_one_drives(tmp_path):
    drivers = [Driver(tmp_path, "elsewhere", stderr=subprocess.DEVNULL) for _ in range(3)]
    assert sorted(driver.holds() for driver in drivers) == [False, False, True]
    for driver in drivers:
        driver.end()


def test_a_torn_lease_is_taken_over_once_it_is_old(tmp_path):
    (tmp_path / "lease").write_text('{"host": "x')
    with pytest.raises(StateError, match="on an unknown host"):
        take(tmp_path)
    os.utime(tmp_path / "lease", (1, 1))
    assert "from process 0 on an unknown host" in take(tmp_path)


def test_without_any_locks_a_dead_process_is_told_from_a_living_one(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(lease.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lease.fcntl, "flock", none)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = lease.LeaseHolder("here", child.pid, time.time(), lease.get_machine_id(), "token")
    (tmp_path / "lease").write_bytes(lease._encode_lease(me, time.time()))
    with pytest.raises(StateError, match=rf"driven by process {child.pid}"):
        take(tmp_path)
    child.kill()
    child.wait()
    child.stdin.close()
    assert f"taken over from process {child.pid}" in take(tmp_path)
