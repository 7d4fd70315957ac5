"""End of worker processes that cannot go on, and the decision of the next one about the trial.

A process that hangs in C code, that breaks down, whose memory is full or that has lost its GPU
cannot be trusted to say so. It dies, and leaves a note in the trial's directory; Ray starts another
one, which reads it:

    mishaps.json      times at which memory ran out, and where
    begun             a line for each process that began the trial, its node: some die before
    held              the trial failed before its first step, and waits for `resume`; once
    last_words.txt    written by Python's faulthandler, a thread in C, as the process dies: where
                      it hung or broke down; or by Python, where a CUDA error was raised that no
                      process survives. Names of functions and lines; no data

Memory that ran out is worth a second try, with fewer examples at once and nobody beside it. A
trial that hangs is not: it would hang again. For a broken process Tune has its own retries.
Nothing is drawn anew by any of them, so none of them costs privacy.
"""

import contextlib
import faulthandler
import json
import os
import re
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

from dpsweep.core import memory
from dpsweep.core.disk import format_bytes, translate_disk_full, write_atomically

_NOTES, _WORDS, BEGUN, _HELD = "mishaps.json", "last_words.txt", "begun", "held"
_LOOK_SECONDS = 0.25
_MAX_TRIES = 2
"""Times that memory may run out before the trial has failed."""

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')


@dataclass(frozen=True)
class Limits:
    """Limits that a worker enforces on a trial."""

    silence_seconds: float | None = None  # longest time without a report; None for any
    memory_bytes: int = 0  # most memory of the process; 0 for any
    gpu_share: float = 1.0  # share of a GPU's memory that it may take, in (0, 1]
    num_devices: int = 1  # GPUs that share its batches; 1 on a CPU
    # True if no other trial of the sweep runs: its second try after memory ran out
    alone: bool = False

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class RetryDecision:
    """Decision on a trial that a worker was given: run it, or end it."""

    # failed; memory: to be run again, alone; None: it is run
    end: Literal["failed", "memory"] | None = None
    reason: str = ""  # why
    halvings: int = 0  # how often the number of examples at once is halved, if it is run


def decide_retry(trial_dir: Path, limits: Limits) -> RetryDecision:
    """Decide by the notes of earlier processes; `trial_dir` must be locked."""
    words = read_last_words(trial_dir)
    if words.startswith("Timeout"):
        return RetryDecision(
            "failed",
            f"it reported nothing for budget.trial_timeout, and its process was ended; it was in "
            f"{_find_code_place(words)}. If an epoch takes that long, raise budget.trial_timeout",
        )
    notes = read_memory_notes(trial_dir)
    if len(notes) >= _MAX_TRIES:
        return RetryDecision(
            "failed",
            f"memory ran out {notes[0]}, and, alone and with half the examples at once, "
            f"{notes[-1]}. Lower train.max_physical_batch, take a smaller model or let it have "
            f"more (resources.memory, resources.gpu)",
        )
    if notes and not limits.alone:
        return RetryDecision("memory", f"memory ran out {notes[0]}")
    return RetryDecision(halvings=len(notes))


def read_begins(trial_dir: Path) -> list[str]:
    """Read the nodes of the processes that have begun the trial, by Ray's ids, the newest last."""
    with contextlib.suppress(FileNotFoundError):
        return (trial_dir / BEGUN).read_text().splitlines()
    return []


def note_begin(trial_dir: Path, node: str) -> None:
    """Add this process to those that `read_begins` lists; `trial_dir` must be locked."""
    with translate_disk_full(trial_dir), (trial_dir / BEGUN).open("a") as file:
        file.write(f"{node}\n")


def read_memory_notes(trial_dir: Path) -> list[str]:
    """Read where memory ran out, one line for each time."""
    place = trial_dir / _NOTES
    return list(json.loads(place.read_text())) if place.exists() else []


def note_memory(trial_dir: Path, where: str) -> None:
    """Add to what `read_memory_notes` tells; durable when it returns."""
    write_atomically(
        trial_dir / _NOTES, json.dumps([*read_memory_notes(trial_dir), where]).encode()
    )


def forget_failures(trial_dir: Path) -> None:
    """Delete the notes of earlier processes: the trial is to be run again once all is mended."""
    for name in (_NOTES, _WORDS):
        (trial_dir / name).unlink(missing_ok=True)


def note_held(trial_dir: Path) -> bool:
    """Note that a failed trial is kept for `resume`; False if an earlier driver noted it too."""
    if (trial_dir / _HELD).exists():
        return False
    write_atomically(trial_dir / _HELD, b"")
    return True


def exit_out_of_memory(trial_dir: Path, where: str) -> NoReturn:
    """End this process because memory ran out; that frees its memory and the trial's lock."""
    try:
        note_memory(trial_dir, where)
    finally:  # a full disk takes the note, but not the end
        os._exit(1)


def exit_without_device(trial_dir: Path, what: str, error: BaseException) -> NoReturn:
    """End this process, which can use its GPU no more: every trial after this one would fail.

    Its last words are written as faulthandler writes them: the innermost call first.

    Args:
        what: The CUDA error, without data.
        error: Where it was raised; CUDA may have noticed it later than it happened.
    """
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}' for frame in frames]
    try:
        write_atomically(trial_dir / _WORDS, "\n".join([f"CUDA error: {what}", *lines]).encode())
    finally:
        os._exit(1)


def read_last_words(trial_dir: Path) -> str:
    """Read what the last process wrote as it died; empty if it lives or was killed from outside."""
    with contextlib.suppress(FileNotFoundError):
        return (trial_dir / _WORDS).read_text(errors="replace")
    return ""


def find_cause_of_death(trial_dir: Path) -> str:
    """Describe why the last process died, in a few words."""
    words = read_last_words(trial_dir)
    if not words:
        return (
            "it was killed from outside: by somebody, or by the system for want of memory (dmesg "
            "on its node tells). resources.memory ends it before that"
        )
    what = words.splitlines()[0].removeprefix("Fatal Python error: ")
    return f"{what} in {_find_code_place(words)}"


class Watchdog:
    """Watches over a trial in this process, from `begin` to `end`.

    Args:
        trial_dir: The trial's.
    """

    def __init__(self, trial_dir: Path, limits: Limits) -> None:
        self._trial_dir, self._limits = trial_dir, limits
        self._over = threading.Event()
        with translate_disk_full(trial_dir):
            self._file: TextIO = (trial_dir / _WORDS).open("w")

    def begin(self) -> None:
        """From now on a breakdown, silence or too much memory end the process with a note."""
        faulthandler.enable(self._file, all_threads=False)
        self._wait()
        if self._limits.memory_bytes and memory.can_measure_private_bytes():
            threading.Thread(target=self._hold_memory, daemon=True).start()

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """The time of this block is no silence of the trial's: others let it wait, or profit."""
        faulthandler.cancel_dump_traceback_later()
        yield
        self._wait()

    def end(self) -> None:
        """Leave the process as it was; it is another trial's next."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable(all_threads=False)
        self._file.close()
        (self._trial_dir / _WORDS).unlink(missing_ok=True)

    def _wait(self) -> None:
        if self._limits.silence_seconds:
            faulthandler.dump_traceback_later(
                self._limits.silence_seconds, exit=True, file=self._file
            )

    def _hold_memory(self) -> None:
        most = self._limits.memory_bytes
        while not self._over.wait(_LOOK_SECONDS):
            if memory.private_bytes() > most and not self._over.is_set():
                exit_out_of_memory(  # how much it held follows from the secret batch
                    self._trial_dir,
                    f"in its worker, which held more than resources.memory, {format_bytes(most)}",
                )


@contextlib.contextmanager
def watch_trial(trial_dir: Path, limits: Limits) -> Iterator[Watchdog]:
    """A `Watchdog` that has begun, and ends with the block."""
    guard = Watchdog(trial_dir, limits)
    guard.begin()
    try:
        yield guard
    finally:
        guard.end()


def _find_code_place(words: str) -> str:
    """file.py:LINE (function), where the trial's thread was."""
    blocks = re.split(r"\n(?=(?:Current thread|Thread) )", words)
    ours = [block for block in blocks if " in run_trial" in block] or blocks
    for line in "\n".join(ours).splitlines():
        found = _FRAME.match(line)
        if found and not found["file"].startswith("<"):  # the machinery of import has no place
            return f"{Path(found['file']).name}:{found['line']} ({found['name']})"
    return "code without a name"
