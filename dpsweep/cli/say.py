"""How verbs speak to people."""

import sys

from rich.console import Console


def console(*, quiet: bool = False) -> Console:
    """Standard output: words wrapped on a terminal, lines left whole in a file or a pipe."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty(), quiet=quiet)


def warn(warnings: list[str]) -> None:
    """Prints warnings to stderr, a line each."""
    for warning in warnings:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
            f"warning: {warning}"
        )
