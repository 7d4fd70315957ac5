"""A process that cannot go on leaves word to the next; what it cannot say itself, C code does."""

import subprocess
import sys

import pytest
from waiting import CEILING_SECONDS

from dpsweep.execution.failures import (
    Limits,
    RetryDecision,
    decide_retry,
    find_cause_of_death,
    note_memory,
    read_last_words,
    read_memory_notes,
    watch_trial,
)

BROKEN = """
import ctypes, os, sys, time
from pathlib import Path
from dpsweep.execution.failures import Limits, watch_trial

def run_trial():
    with watch_trial(Path({trial_dir!r}), {limits}) as watch:
        {body}
    print("through")

run_trial()
"""


@pytest.fixture
def process(tmp_path):
    """Runs code under a watch, in a process of its own; returns its exit code and output."""

    def run(body, limits=None):
        code = BROKEN.format(trial_dir=str(tmp_path), limits=limits or Limits(), body=body)
        place = tmp_path / "broken.py"
        place.write_text(code)
        done = subprocess.run(
            [sys.executable, str(place)],
            capture_output=True,
            text=True,
            timeout=CEILING_SECONDS,
            check=False,
        )
        return done.returncode, done.stdout

    return run


def test_a_process_that_hangs_in_c_with_the_lock_held_is_ended_and_the_trial_has_failed(
    process, tmp_path
):
    limits = Limits(silence_seconds=0.5)
    code, said = process("ctypes.PyDLL(None).sleep(1000)", limits)
    assert (code, said) == (1, "")
    told = decide_retry(tmp_path, limits)
    assert told.end == "failed"
    assert "it reported nothing for budget.trial_timeout" in told.reason
    assert "it was in broken.py:8 (run_trial)" in told.reason


def test_reports_begin_the_time_anew_and_waiting_for_the_driver_does_not_count(
    monkeypatch, tmp_path
):
    armed = []  # the clock is C code's own, and ends the process
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda after, **_: armed.append(after))
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", armed.clear)
    with watch_trial(tmp_path, Limits(silence_seconds=0.8)) as watch:
        for _ in range(2):
            assert armed == [0.8]
            with watch.excused():
                assert armed == []
        assert armed == [0.8]
        assert (tmp_path / "last_words.txt").exists()
    assert armed == []
    assert decide_retry(tmp_path, Limits()) == RetryDecision()
    assert not (tmp_path / "last_words.txt").exists()


def test_a_segmentation_fault_says_where_it_was_and_is_left_to_tunes_retries(process, tmp_path):
    code, _ = process("ctypes.string_at(0)")
    assert code < 0
    assert decide_retry(tmp_path, Limits()) == RetryDecision()
    assert find_cause_of_death(tmp_path).startswith("Segmentation fault in __init__.py:")


def test_a_process_killed_from_outside_says_nothing_and_the_reason_says_so(process, tmp_path):
    code, _ = process("os.kill(os.getpid(), 9)")
    assert code == -9
    assert read_last_words(tmp_path) == ""
    assert "killed from outside" in find_cause_of_death(tmp_path)
    assert "dmesg" in find_cause_of_death(tmp_path)


def test_a_process_that_takes_more_than_its_memory_is_ended(process, tmp_path):
    body = "kept = bytearray(os.urandom(1)) * 2**30; time.sleep(1000)"
    code, said = process(body, Limits(memory_bytes=200_000_000))
    assert (code, said) == (1, "")
    (note,) = read_memory_notes(tmp_path)
    assert note == "in its worker, which held more than resources.memory, 200.0 MB"


LOST = """
from pathlib import Path
from dpsweep.execution.failures import exit_without_device

def forward():
    raise RuntimeError("CUDA error: misaligned address, of an example with 0.25 in it")

def run_trial():
    try:
        forward()
    except RuntimeError as e:
        exit_without_device(Path({trial_dir!r}), "misaligned address", e)

try:
    run_trial()
finally:
    print("went on")
"""


def test_a_process_that_lost_its_gpu_is_ended_and_says_where_but_no_data(tmp_path):
    def ended(trial_dir):
        place = tmp_path / "lost.py"
        place.write_text(LOST.format(trial_dir=str(trial_dir)))
        done = subprocess.run(
            [sys.executable, str(place)],
            capture_output=True,
            text=True,
            timeout=CEILING_SECONDS,
            check=False,
        )
        return done.returncode, done.stdout

    assert ended(tmp_path) == (1, "")
    assert decide_retry(tmp_path, Limits()) == RetryDecision(), "another process may try"
    assert find_cause_of_death(tmp_path) == "CUDA error: misaligned address in lost.py:6 (forward)"
    assert "0.25" not in read_last_words(tmp_path)
    assert ended(tmp_path / "nowhere") == (1, ""), "also where nothing can be written"


def test_memory_may_run_out_twice_the_second_time_alone(tmp_path):
    together, alone = Limits(), Limits(alone=True)
    assert decide_retry(tmp_path, together) == decide_retry(tmp_path, alone) == RetryDecision()
    note_memory(tmp_path, "on the GPU")
    assert decide_retry(tmp_path, together) == RetryDecision("memory", "memory ran out on the GPU")
    assert decide_retry(tmp_path, alone) == RetryDecision(halvings=1)
    note_memory(tmp_path, "in its worker")
    told = decide_retry(tmp_path, alone)
    assert told.end == "failed"
    assert (
        "ran out on the GPU, and, alone and with half the examples at once, in its" in told.reason
    )
    assert "train.max_physical_batch" in told.reason
