"""What the system says of the memory that this process holds, in bytes."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def tells_own() -> bool:
    """Whether `own` has anything to read: on Linux."""
    return _STATUS.exists()


def own() -> int:
    """What would be free without this process: not files which it has mapped; 0 if unknown.

    The data set is such a file, of which a node has one copy.
    """
    return _status("RssAnon") or 0


def resident() -> int:
    """What it holds now, mapped files included; `peak` starts from here where the system lets us.

    Elsewhere the peak so far.
    """
    if _CLEAR.exists():
        _CLEAR.write_text(_RESET_PEAK)
    return _status("VmRSS") or peak()


def peak() -> int:
    """The most it has held since `resident` was asked, or since it began."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(key: str) -> int | None:
    """A line of Linux's account of this process; None where there is none."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    found = (line.split()[1] for line in lines if line.startswith(key + ":"))
    size = next(found, None)
    return None if size is None else int(size) * 1024
