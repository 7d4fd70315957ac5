"""Output of the verbs: consoles, warnings and errors."""

import codecs
import io
import os
import sys

from rich.console import Console

STOPPED = 130
"""Exit code of what was ended before its end, as for a program ended by Ctrl-C."""

NOTHING_COMPLETED = 1
"""Exit code of a sweep that ran to its end, and of which no trial was completed."""

_FILE_WIDTH = 120

_SPELLED = {
    **{"ε": "eps", "δ": "delta", "σ": "sigma", "κ": "kappa", "γ": "gamma", "ρ": "rho"},
    **{"λ": "lambda", "β": "beta", "η": "eta", "±": "+-", "–": "-", "…": "...", "∞": "inf"},
    **{"≥": ">=", "≤": "<=", "→": "->", "·": "."},
}


def _spell_out(e: UnicodeError) -> tuple[str, int]:
    """Spell letters that an output cannot show; a codec's error handler."""
    if not isinstance(e, UnicodeEncodeError):
        raise e
    return "".join(_SPELLED.get(c, "?") for c in e.object[e.start : e.end]), e.end


def spell_out_letters() -> None:
    """Let stdout and stderr spell what their encoding lacks: ε is eps on an ASCII terminal."""
    codecs.register_error("dpsweep", _spell_out)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # else a program has put its own in its place
            stream.reconfigure(errors="dpsweep")


def console(*, quiet: bool = False) -> Console:
    """Standard output: words wrapped on a terminal, lines left whole in a file or a pipe."""
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else _FILE_WIDTH
    return Console(highlight=False, soft_wrap=not terminal, quiet=quiet, width=width)


def say(text: str, *, quiet: bool = False) -> None:
    """Print a text as it is: what stands in brackets is no markup."""
    console(quiet=quiet).print(text, markup=False)


def warn(warnings: list[str]) -> None:
    """Print warnings to stderr, a line each."""
    for warning in warnings:
        _stderr().print(f"warning: {warning}")


def error(text: str) -> None:
    """Print to stderr what ends the program."""
    _stderr().print(f"error: {text}")


def _stderr() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
