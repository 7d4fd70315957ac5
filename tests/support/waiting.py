"""Waiting for what a test is about, with a ceiling that a loaded machine does not reach."""

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

CEILING_SECONDS = 600.0
"""A wait ends with its event; only what hangs takes as long as this."""


def wait_for(
    condition: Callable[[], Found],
    what: str,
    process: subprocess.Popen | None = None,
    seconds: float = CEILING_SECONDS,
) -> Found:
    """Return what `condition` gives once it is true.

    Args:
        condition: Looked at ten times a second.
        what: Does not happen, says the failure.
        process: Without which it cannot happen: its end ends the wait.
        seconds: The ceiling.
    """
    end = time.monotonic() + seconds
    while True:
        alive = process is None or process.poll() is None
        if found := condition():  # looked at once more after the process's end
            return found
        assert alive, f"{what} did not happen: the process ended with {process.returncode}"
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.1)
