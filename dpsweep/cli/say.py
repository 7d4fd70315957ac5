"""Output of the verbs: consoles, warnings and errors."""

import os
import sys

from rich.console import Console

STOPPED = 130
"""Exit code of what was ended before its end, as for a program ended by Ctrl-C."""

NOTHING_COMPLETED = 1
"""Exit code of a sweep that ran to its end, and of which no trial was completed."""

_FILE_WIDTH = 120


def console(*, quiet: bool = False) -> Console:
    """Standard output: words wrapped on a terminal, lines left whole in a file or a pipe."""
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else _FILE_WIDTH
    return Console(highlight=False, soft_wrap=not terminal, quiet=quiet, width=width)


def warn(warnings: list[str]) -> None:
    """Print warnings to stderr, a line each."""
    for warning in warnings:
        _stderr().print(f"warning: {warning}")


def error(text: str) -> None:
    """Print to stderr what ends the program."""
    _stderr().print(f"error: {text}")


def _stderr() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
