"""Processes are ended with all that they started, and nothing else is."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpsweep.cluster.local import Local
from dpsweep.cluster.processes import MARK, Process, end, run, start, sweep_up, wait_for
from dpsweep.core.errors import ConnectionRefused, StateError

ESCAPES = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def started(tmp_path, code, mark="a-mark"):
    words = [sys.executable, "-c", code]
    return start("it", words, tmp_path / "log", {**os.environ, MARK: mark})


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_that_left_the_session_is_ended_too_and_a_stranger_is_not(tmp_path):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        process = started(tmp_path, ESCAPES)
        wait_for(lambda: (tmp_path / "log").read_text().endswith("\n"), process, 30)
        child = int((tmp_path / "log").read_text())
        assert runs(process.pid)
        assert runs(child)
        assert end([process], "a-mark", grace=0.2) == 1
        assert not process.is_alive
        assert not runs(child)
        assert end([process], "a-mark") == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_number_that_was_given_again_is_left_alone(tmp_path):
    process = started(tmp_path, "import time; time.sleep(600)")
    older = Process(process.name, process.pid, process.born - 1, process.log)
    assert not older.is_alive
    assert older.members() == []
    assert end([older], "another-mark") == 0
    assert process.is_alive
    sweep_up([process], mark=None)
    assert not process.is_alive


@pytest.mark.parametrize("text", ["{", "[]", '{"nodes": [{}], "services": []}'])
def test_a_damaged_note_says_how_to_find_what_runs(tmp_path, text):
    (tmp_path / "up.json").write_text(text)
    with pytest.raises(StateError, match=r"up\.json: cannot be read .*grep -l DPSWEEP_UP /proc"):
        Local.at(tmp_path)


def test_one_that_ends_at_once_says_why(tmp_path):
    process = started(tmp_path, "raise SystemExit('the port is taken')")
    with pytest.raises(ConnectionRefused, match=r"it ended at once. .*log ends with: the port is"):
        wait_for(lambda: False, process, 30)


def test_one_that_is_never_ready_is_told_with_the_time(tmp_path):
    process = started(tmp_path, "import time; time.sleep(600)")
    before = time.monotonic()
    with pytest.raises(ConnectionRefused, match=r"is not ready after 0.2 s"):
        wait_for(lambda: False, process, 0.2)
    assert time.monotonic() - before < 10
    end([process], "a-mark")


def test_a_program_that_fails_says_what_it_said():
    with pytest.raises(ConnectionRefused, match=r"failed: no such thing"):
        run([sys.executable, "-c", "raise SystemExit('no such thing')"], dict(os.environ))


def test_what_a_process_writes_is_its_users_alone(tmp_path):
    code = f"open({str(tmp_path / 'made')!r}, 'w').close(); import time; time.sleep(600)"
    process = started(tmp_path, code)
    wait_for((tmp_path / "made").exists, process, 30)
    end([process], "a-mark", grace=0.2)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600
