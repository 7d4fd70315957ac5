"""A queue on disk between the sweep and the tracking server.

Whatever is to be tracked is appended to a file first. A thread delivers it in batches and
notes how far it got. If the server is away the file grows and the thread tries again; a
sweep never waits for it, and what was not delivered is delivered by the next driver.
"""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsweep.core.disk import translate_disk_full

Event = dict[str, Any]
"""One thing to track; see tracking/tracker.py for the kinds."""

Deliver = Callable[[list[Event]], None]
"""Delivers a batch, or raises. The same event may come twice: it must not matter."""

log = logging.getLogger(__name__)

_FILE, _MARK, _REFUSED = "spool.jsonl", "spool.delivered", "spool.refused.jsonl"
_COALESCE_SECONDS = 0.5
_LOOK_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 30.0
_BATCH = 2000


class Undeliverable(Exception):
    """The server answered, and refused this batch for good; trying again is no use."""


@dataclass(frozen=True)
class Backlog:
    """Content of a spool, read from outside."""

    waiting: int  # events that are not delivered yet
    delivered_bytes: int  # size of those that are, and can go
    refused: int  # events that the server will never take
    reason: str | None  # why it refused the last of them; None if there is none


def read_backlog(folder: Path) -> Backlog:
    """Read the spool of `folder`, which another process may be using; changes nothing."""
    mark = _parse_position(folder / _MARK)
    whole = (folder / _FILE).read_bytes() if (folder / _FILE).exists() else b""
    mark = mark if mark <= len(whole) else 0
    refused = _read_lines(folder / _REFUSED)
    reason = json.loads(refused[-1])["reason"] if refused else None
    return Backlog(whole.count(b"\n", mark), mark, len(refused), reason)


class Spool:
    """The file, and the position in it up to which everything was delivered."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._mark = folder / _FILE, folder / _MARK
        self._refused = folder / _REFUSED
        self._lock = threading.Lock()
        self._file.touch(mode=0o600)
        self._cut_torn_line()
        self._known_refused = set(_read_lines(self._refused))
        if self._read_position() > self._file.stat().st_size:
            self.mark_delivered(0)  # another's mark: saying things twice does no harm

    def append(self, event: Event) -> None:
        """Add one event; on disk, as far as this process is concerned, when it returns.

        Raises:
            DiskFull: If there is no space; nothing of the event is left in the file.
        """
        line = (json.dumps(event) + "\n").encode()
        with self._lock, translate_disk_full(self._file.parent):
            file = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                _write_line(file, line)
            finally:
                os.close(file)

    def waiting(self) -> tuple[list[Event], int]:
        """The next undelivered events, at most a batch, and the position after them."""
        with self._lock, self._file.open("rb") as file:
            file.seek(self._read_position())
            lines: list[bytes] = []
            while len(lines) < _BATCH and (line := file.readline()):
                lines.append(line)
            return list(_parse_events(lines)), file.tell()

    def is_empty(self) -> bool:
        """True if everything was delivered."""
        return self._read_position() >= self._file.stat().st_size

    def mark_delivered(self, position: int) -> None:
        """Note that everything before `position` is delivered."""
        temporary = self._mark.with_suffix(".new")
        temporary.write_text(str(position))
        os.replace(temporary, self._mark)

    def refuse(self, event: Event, reason: str) -> None:
        """Put an event aside that the server will never take; once, if it comes again."""
        line = json.dumps({"reason": reason, "event": event})
        if line not in self._known_refused:
            with self._refused.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self._known_refused.add(line)

    def count_refused(self) -> int:
        """Count the events that were put aside."""
        return len(self._known_refused)

    @property
    def refused_file(self) -> Path:
        """File of the refused events, each with the server's reason."""
        return self._refused

    def truncate_delivered(self) -> None:
        """Empty the file if everything in it was delivered.

        The mark goes first: after a crash between the two, all is delivered once more.
        """
        with self._lock:
            if self.is_empty():
                self.mark_delivered(0)
                os.truncate(self._file, 0)

    def _read_position(self) -> int:
        return _parse_position(self._mark)

    def _cut_torn_line(self) -> None:
        """Drop what a killed driver left of its last line; the study still knows the fact."""
        whole = self._file.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            with self._file.open("r+b") as file:
                file.truncate(end)


def _parse_position(mark: Path) -> int:
    """Parse a position; 0 if a crash of the machine destroyed it: all is delivered again."""
    try:
        return int(mark.read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _parse_events(lines: list[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # a crash of the machine; the study still knows the fact
            log.warning("the spool held a line that cannot be read: %r", line[:80])


def _read_lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _write_line(file: int, line: bytes) -> None:
    """Append all of `line`, or leave the file as it was."""
    before = os.fstat(file).st_size
    try:
        if os.write(file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(file, before)
        raise


class DeliveryThread:
    """The thread that empties a spool."""

    def __init__(self, spool: Spool, deliver: Deliver) -> None:
        self._spool, self._deliver = spool, deliver
        self._closing = threading.Event()
        self._deadline = float("inf")
        self.trouble: str | None = None
        self._thread = threading.Thread(target=self._work, name="dpsweep-delivery", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is left, the server gives trouble, or time is up."""
        deadline = time.monotonic() + timeout
        while not self._spool.is_empty():
            if self.trouble is not None or time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def close(self, timeout: float) -> bool:
        """Deliver what is left, for at most `timeout` seconds. True if nothing is left.

        What was delivered is cut from the file. May be called again, to no further effect.
        """
        self._deadline = time.monotonic() + timeout
        self._closing.set()
        self._thread.join(timeout + _COALESCE_SECONDS)
        if self._thread.is_alive():
            return False
        self._spool.truncate_delivered()
        return self._spool.is_empty()

    def _work(self) -> None:
        pause = _COALESCE_SECONDS
        while time.monotonic() < self._deadline:
            closing = self._closing.is_set()  # before the look: nothing is appended after it
            if self._spool.is_empty():
                if closing:
                    return
                self._closing.wait(_COALESCE_SECONDS)
                continue
            try:
                self._deliver_batch()
                pause, self.trouble = _COALESCE_SECONDS, None
            except Exception as e:  # whatever the server did, the sweep goes on
                self.trouble = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
                log.debug("tracking server: %s", self.trouble)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._wait(min(pause, self._deadline - time.monotonic()))

    def _deliver_batch(self) -> None:
        events, position = self._spool.waiting()
        try:
            self._deliver(events)
        except Undeliverable:
            for event in events:  # find the one at fault
                try:
                    self._deliver([event])
                except Undeliverable as e:
                    self._spool.refuse(event, str(e))
        self._spool.mark_delivered(position)

    def _wait(self, seconds: float) -> None:
        """Gather events for a while, or leave a server in trouble alone; closing cuts it short."""
        if not self._closing.is_set():
            self._closing.wait(seconds)
        elif self.trouble is not None:
            time.sleep(max(0.0, min(seconds, 1.0)))
