"""Ports of this machine: which are free, what listens, and what answers HTTP."""

import contextlib
import socket
import urllib.error
import urllib.request

from dpsweep.core.errors import ConnectionRefused

HOST = "127.0.0.1"


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
