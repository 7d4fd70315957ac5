"""Servers and processes of this machine: started for a test, asked for, and ended."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from waiting import CEILING_SECONDS, wait_for

_ORDERLY_SECONDS = 5.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port: int) -> bool:
    """True if something listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def python(module: str, *args: object) -> list[str]:
    """The command that runs a module in an interpreter like this one."""
    return [sys.executable, "-m", module, *map(str, args)]


def start_mlflow(folder: Path, port: int, **options: object) -> subprocess.Popen:
    """Start an MLflow server over the files in `folder`, and wait until it answers."""
    server = subprocess.Popen(
        [
            *python("mlflow", "server", "--port", port, "--workers", 1),
            *("--backend-store-uri", f"sqlite:///{folder}/server.db"),
            *("--artifacts-destination", str(folder / "artifacts")),
        ],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
        **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options},
    )
    wait_for(lambda: answers(port), "MLflow's answer", server)
    return server


def end_group(server: subprocess.Popen) -> None:
    """End a process that leads a session, and all of it."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(_ORDERLY_SECONDS)
        except subprocess.TimeoutExpired:  # a raylet looks for its dead head for a minute
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(CEILING_SECONDS)


def command_lines() -> Iterator[str]:
    """What each process of this machine was called with, its words parted by NUL."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield place.read_text(errors="replace")
