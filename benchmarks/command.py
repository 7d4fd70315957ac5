"""Run a script of this folder as the command line runs a verb."""

import sys
from collections.abc import Callable

import typer

from dpsweep.cli.say import error
from dpsweep.core.errors import DpSweepError


def command(script: Callable[..., None]) -> typer.Typer:
    """Build the command line of a script from its function's annotations."""
    # with rich's markup, what stands in brackets would be missing from the help
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
    app.command()(script)
    return app


def run(script: Callable[..., None]) -> None:
    """Run a script; a user's mistake is one message on stderr, and exit code 2."""
    try:
        command(script)()
    except DpSweepError as e:
        error(str(e))
        sys.exit(2)
