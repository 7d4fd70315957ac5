"""A sweep has one driver, on one machine or on several, and a dead one's place is taken."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from dpsweep.core.errors import StateError
from dpsweep.store import lease
from dpsweep.store.lease import Pace, held, last_owner, owner_of

PACE = Pace(beat_seconds=0.1, silent_seconds=0.6, settle_seconds=0.1)

DRIVER = """
import os, sys
from pathlib import Path
from dpsweep.store import lease
if sys.argv[2] == "elsewhere":  # a machine whose locks ours does not see
    lease.machine = lambda: f"machine {os.getpid()}"
    lease.fcntl.flock = lambda *_: None
with lease.held(Path(sys.argv[1]), lease.Pace(0.1, 0.6, 0.1)) as mine:
    print("held", flush=True)
    for line in sys.stdin:
        print("lost" if mine.is_lost() else "mine", flush=True)
"""


class Driver:
    """A process that drives a sweep, and says on demand whether it still may."""

    def __init__(self, folder, where):
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder), where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "held\n"
        self.pid = self.process.pid

    def says(self):
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

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
        return started[-1]

    yield start
    for driver in started:
        driver.end()


def take(folder, pace=PACE):
    with held(folder, pace) as mine:
        return mine.taken_over


def test_a_killed_driver_of_this_machine_is_succeeded_at_once(tmp_path, drive):
    driver = drive()
    assert owner_of(tmp_path, PACE).pid == driver.pid
    driver.end()
    assert owner_of(tmp_path, PACE) is None
    said = take(tmp_path, Pace(silent_seconds=1000))
    assert re.fullmatch(rf"taken over from process {driver.pid} on \S+, silent for 0 s", said)
    assert take(tmp_path) is None, "a driver that ended in good order leaves nothing to take over"


def test_a_driver_elsewhere_is_believed_as_long_as_its_beat_is_fresh(tmp_path, drive):
    driver = drive("elsewhere")
    time.sleep(PACE.silent_seconds + 0.2)  # longer than it may be silent: it does beat
    assert owner_of(tmp_path, PACE).pid == driver.pid
    words = rf"driven by process {driver.pid} on .*try again in \d+ s.*dpsweep stop"
    with pytest.raises(StateError, match=words):
        take(tmp_path)
    driver.end()
    with pytest.raises(StateError, match="try again in 1 s"):
        take(tmp_path)
    time.sleep(PACE.silent_seconds + 0.1)
    assert owner_of(tmp_path, PACE) is None
    assert f"taken over from process {driver.pid} on" in take(tmp_path)


def test_who_waits_succeeds_a_driver_elsewhere_once_it_is_silent(tmp_path, drive, caplog):
    driver = drive("elsewhere")
    with pytest.raises(StateError, match="is being driven by"), held(tmp_path, PACE, 1.5):
        pass
    assert owner_of(tmp_path, PACE).pid == driver.pid, "it was alive all the time"
    driver.end()
    caplog.clear()
    with held(tmp_path, PACE, 60) as mine:
        assert f"taken over from process {driver.pid} on" in mine.taken_over
    (said,) = caplog.messages
    assert said.endswith("Waiting for it, up to 60 s")


def test_the_clock_of_the_other_machine_does_not_matter(tmp_path, drive):
    driver = drive("elsewhere")
    driver.end()
    stored = json.loads((tmp_path / "lease").read_text())
    later = os.stat(tmp_path / "lease").st_mtime
    (tmp_path / "lease").write_text(json.dumps({**stored, "beat": stored["beat"] + 7200}))
    os.utime(tmp_path / "lease", (later - 100, later - 100))
    assert "silent for 100 s" in take(tmp_path)


def test_a_driver_that_slept_too_long_learns_that_it_was_succeeded(tmp_path, drive):
    driver = drive("elsewhere")
    assert driver.says() == "mine"
    os.kill(driver.pid, signal.SIGSTOP)
    time.sleep(PACE.silent_seconds + 0.1)
    with held(tmp_path, PACE) as mine:
        os.kill(driver.pid, signal.SIGCONT)
        assert driver.says() == "lost"
        before = (tmp_path / "lease").stat().st_mtime_ns
        time.sleep(3 * PACE.beat_seconds)
        assert not mine.is_lost()
        assert last_owner(tmp_path).pid == os.getpid()
        assert (tmp_path / "lease").stat().st_mtime_ns > before, "the successor still renews it"
    assert driver.says() == "lost", "and it does not come back when the place is free again"


def test_a_driver_that_slept_unnoticed_goes_on(tmp_path, drive):
    driver = drive()
    os.kill(driver.pid, signal.SIGSTOP)
    time.sleep(PACE.silent_seconds + 0.1)
    with pytest.raises(StateError, match=rf"is being driven by process {driver.pid}"):
        take(tmp_path)
    os.kill(driver.pid, signal.SIGCONT)
    assert driver.says() == "mine"


def test_a_suspended_driver_is_told_from_a_busy_one(tmp_path, drive, monkeypatch):
    monkeypatch.setattr(lease, "PACE", PACE)
    driver = drive()
    os.kill(driver.pid, signal.SIGSTOP)
    time.sleep(PACE.silent_seconds + 0.1)
    with pytest.raises(
        StateError, match=rf"may be suspended: wake it with kill -CONT {driver.pid}"
    ):
        take(tmp_path)
    os.kill(driver.pid, signal.SIGCONT)


def test_a_lost_lease_says_so_before_anything_is_written(tmp_path):
    with held(tmp_path, Pace(beat_seconds=0.05)) as mine:
        mine.check()
        (tmp_path / "lease").unlink()
        time.sleep(0.2)
        with pytest.raises(StateError, match=r"another process drives .* writes nothing more"):
            mine.check()


def test_is_lost_looks_itself_if_the_thread_did_not(tmp_path, monkeypatch):
    with held(tmp_path, Pace(beat_seconds=1.0)) as mine:
        (tmp_path / "lease").write_text((tmp_path / "lease").read_text().replace("a", "b"))
        assert not mine.is_lost(), "confirmed a moment ago"
        now = lease._clock()
        monkeypatch.setattr(lease, "_clock", lambda: now + 3)
        assert mine.is_lost()


def test_of_two_who_take_over_at_once_one_drives(tmp_path):
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), "elsewhere"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(3)
    ]
    time.sleep(1.2)
    for driver in drivers:
        driver.stdin.close()
    told = [driver.stdout.read() for driver in drivers]
    for driver in drivers:
        driver.wait()
        driver.stdout.close()
    assert sorted(told) == ["", "", "held\n"]


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
    me = lease.Owner("here", child.pid, time.time(), lease.machine(), "token")
    (tmp_path / "lease").write_bytes(lease._encoded(me, time.time()))
    with pytest.raises(StateError, match=rf"driven by process {child.pid}"):
        take(tmp_path)
    child.kill()
    child.wait()
    child.stdin.close()
    assert f"taken over from process {child.pid}" in take(tmp_path)
