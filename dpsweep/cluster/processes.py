"""Processes that outlive their starter, written down so that exactly they can be ended later.

A process is known by its number and the moment it was born, since numbers are given again. All
that it starts inherits a mark in the environment, and its session, so that they are found when
it is gone. Nothing is ever ended by name. Linux alone: /proc is read. Beside them are the ports of
this machine: which are free, what listens, and what answers HTTP.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsweep.core.errors import ConnectionRefused

HOST = "127.0.0.1"
MARK = "DPSWEEP_UP"
"""Environment variable that holds the id of what a process belongs to."""

_CHILDREN: list["subprocess.Popen[bytes]"] = []
"""Those that this process started itself: it has to wait for them, or they stay as zombies."""

_PAUSE_SECONDS, _KILL_SECONDS = 0.05, 10.0
"""Time between two looks, and the longest that a killed process may take to be gone."""

_STATE, _SESSION, _BORN = 0, 3, 19
"""Fields of /proc/PID/stat behind the name: state, session, start time in ticks since boot."""


@dataclass(frozen=True)
class Process:
    """A process that was started here, and leads a session of its own."""

    name: str  # what it is for people, such as node 0
    pid: int  # its number, and its session's
    born: int  # when it was started, in ticks since the machine was
    log: str  # where its output goes
    end_signal: int = signal.SIGTERM  # what ends it in good order

    @property
    def is_alive(self) -> bool:
        """True while this very process runs; a zombie does not."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[_BORN]) == self.born

    def members(self) -> list[int]:
        """Everything that runs in its session, itself too; also what survived it."""
        fields = _stat(self.pid)
        if fields is not None and int(fields[_BORN]) != self.born:
            return []  # the number was given again: its session is another's
        return [pid for pid, found in _list_processes() if int(found[_SESSION]) == self.pid]


def start(
    name: str,
    command: Sequence[str | Path],
    log: Path,
    environment: Mapping[str, str],
    *,
    end_signal: int = signal.SIGTERM,
    **how: Any,
) -> Process:
    """Start a program in a session of its own, its output to `log` (0600).

    Args:
        end_signal: What ends it in good order.
        how: More for subprocess.Popen, such as the user. What it writes is its user's alone.
    """
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "ab") as out:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            umask=0o077,
            **how,
        )
    _CHILDREN.append(child)
    fields = _stat(child.pid)
    born = int(fields[_BORN]) if fields else -1  # it is over already; its log says why
    return Process(name, child.pid, born, str(log), end_signal)


def wait_for(ready: Callable[[], bool], process: Process, seconds: float) -> None:
    """Wait until `process` does what it is for.

    Raises:
        ConnectionRefused: If it ended, or took too long, with the end of what it said.
    """
    end = time.monotonic() + seconds
    while not ready():
        if not process.is_alive:
            raise ConnectionRefused(f"{process.name} ended at once. {_last_words(process)}")
        if time.monotonic() > end:
            raise ConnectionRefused(
                f"{process.name} is not ready after {seconds:g} s. If the machine is busy, try "
                f"again. {_last_words(process)}"
            )
        time.sleep(_PAUSE_SECONDS)


def run(command: Sequence[str | Path], environment: Mapping[str, str], **how: Any) -> None:
    """Run a program to its end; ConnectionRefused if it fails, with what it said."""
    done = subprocess.run(
        [str(word) for word in command],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
        **how,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ConnectionRefused(f"{shlex.join([str(command[0])])} failed: {said}")


def end(processes: Sequence[Process], mark: str, grace: float = 15.0) -> int:
    """End processes and all that they started; return how many.

    Args:
        mark: Their common id.
        grace: Seconds that they have to end in good order, before it is killed.
    """
    alive = [p for p in processes if p.is_alive]
    for process in reversed(alive):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, process.end_signal)
    _until(lambda: not any(process.is_alive for process in alive), grace)
    sweep_up(processes, mark)
    return len(alive)


def sweep_up(processes: Sequence[Process], mark: str | None) -> None:
    """Kill whatever is left of `processes`, and of all that bears `mark`."""

    def kill_all() -> bool:
        left = {pid for process in processes for pid in process.members()}
        left |= set(_list_marked(mark)) if mark else set()
        for pid in left - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return not left

    _until(kill_all, _KILL_SECONDS)


def _until(done: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not done() and time.monotonic() < limit:
        time.sleep(_PAUSE_SECONDS)


def _last_words(process: Process) -> str:
    said = [line for line in Path(process.log).read_text(errors="replace").splitlines() if line]
    return f"{process.log} ends with: {' / '.join(said[-3:]) or 'nothing'}"


def _list_processes() -> Iterator[tuple[int, list[str]]]:
    for place in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(place.name))
        if fields is not None:
            yield int(place.name), fields


def _stat(pid: int) -> list[str] | None:
    """Read a process's /proc/PID/stat; None if it is gone or a zombie."""
    _CHILDREN[:] = [child for child in _CHILDREN if child.poll() is None]
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[_STATE] in "ZX" else fields


def _list_marked(mark: str) -> Iterator[int]:
    """Processes whose environment says that they belong to `mark`."""
    wanted = f"{MARK}={mark}".encode()
    for pid, _ in _list_processes():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield pid


def free_port(wished: int | None) -> int:
    """`wished` if nobody listens there, or a port that is free."""
    for port in (wished, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port or 0))
            found: int = probe.getsockname()[1]
            return found
    raise ConnectionRefused(f"no port is free on {HOST}. End some servers, and try again")


def listens(port: int) -> bool:
    """True if something listens."""
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((HOST, port)) == 0


def http_status(url: str) -> int:
    """The HTTP status of an answer; 0 if there is none."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as e:
        return e.code
    except OSError:
        return 0
