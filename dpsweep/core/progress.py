"""Long work outside training, in chunks: a line on standard error now and then."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dpsweep.core.threads import torch_threads

_FIRST_SECONDS, _SECONDS = 5.0, 30.0


class ProgressLines:
    """Print how far work has come and how long the rest takes; nothing if it is soon done.

    Args:
        what: Begins each line.
        total: Size of the work.
        unit: What is counted, such as "images".
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done, self._begun, self._lock = 0, time.monotonic(), threading.Lock()
        self._due = self._begun + _FIRST_SECONDS

    def advance(self, count: int) -> None:
        """Count more as done; any thread may."""
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now < self._due or self._done >= self._total:
                return
            self._due = now + _SECONDS
            left = (now - self._begun) * (self._total - self._done) / self._done
        print(
            f"{self._what}: {self._done} of {self._total} {self._unit}, "
            f"{format_duration(left)} left",
            file=sys.stderr,
            flush=True,
        )


def format_duration(seconds: float) -> str:
    """A time as people say it: two digits and one unit.

    >>> format_duration(42.4), format_duration(400), format_duration(9000)
    ('42 s', '7 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def run_chunks(
    work: Callable[[slice], None], total: int, size: int, advance: Callable[[int], None]
) -> None:
    """Call `work` for consecutive slices of `range(total)`, on as many threads as torch may use.

    Operations this small are faster side by side, each on one thread, than each in pieces.
    """

    def run(first: int) -> None:
        work(slice(first, first + size))
        advance(min(size, total - first))

    with torch_threads(1) as before, ThreadPoolExecutor(before) as pool:
        list(pool.map(run, range(0, total, size)))
