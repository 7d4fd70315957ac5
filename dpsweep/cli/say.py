"""How verbs speak to people."""

import os
import sys

from rich.console import Console

_FILE_WIDTH = 120


def console(*, quiet: bool = False) -> Console:
    """Standard output: words wrapped on a terminal, lines left whole in a file or a pipe."""
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else _FILE_WIDTH
    return Console(highlight=False, soft_wrap=not terminal, quiet=quiet, width=width)


def warn(warnings: list[str]) -> None:
    """Prints warnings to stderr, a line each."""
    for warning in warnings:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
            f"warning: {warning}"
        )
