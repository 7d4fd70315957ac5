"""Which of several methods won a search, and whether the comparison was even."""

from dataclasses import dataclass
from statistics import median

from rich.table import Table

from dpsweep.report.plain import plain_table
from dpsweep.tune.record import Record

_KEY = "method.name"


@dataclass(frozen=True)
class Standing:
    """How one method did.

    Attributes:
        method: Its name.
        trials: All that were started.
        best: Objective of its best complete trial; None if there is none.
        middle: Median objective of its complete trials; None if there is none.
    """

    method: str
    trials: int
    best: float | None
    middle: float | None


def standings(records: list[Record], direction: str) -> list[Standing]:
    """Methods of a search over several, the best first; empty for a search over one."""
    by_method: dict[str, list[Record]] = {}
    for record in records:
        if _KEY in record.knobs and record.confirms is None:
            by_method.setdefault(record.knobs[_KEY], []).append(record)
    pick = max if direction == "maximize" else min
    table = []
    for method, trials in by_method.items():
        values = [r.value for r in trials if r.state == "complete" and r.value is not None]
        best, middle = (pick(values), median(values)) if values else (None, None)
        table.append(Standing(method, len(trials), best, middle))
    sign = -1 if direction == "maximize" else 1
    table.sort(key=lambda s: (s.best is None, sign * (s.best or 0)))
    return table if len(table) > 1 else []


def verdict(table: list[Standing]) -> str:
    """Who won, in a sentence; empty for a search over one method or without a result."""
    if not table or table[0].best is None:
        return ""
    first, counts = table[0], sorted({standing.trials for standing in table})
    if len(counts) == 1:
        words = f"{first.method} won under equal trials ({counts[0]} each)"
    else:
        words = (
            f"{first.method} leads, but trials were not equal ({counts[0]} to {counts[-1]} a "
            f"method); each_of gives every method the same number, if budget.trials is a multiple"
        )
    return f"{words}: {first.best:.4f}{_runner_up(table[1])}."


def standings_table(table: list[Standing]) -> Table:
    """One line a method."""
    shown = plain_table("By method")
    shown.add_column("method")
    for name in ("trials", "best", "median"):
        shown.add_column(name, justify="right")
    for s in table:
        figures = ("–" if x is None else f"{x:.4f}" for x in (s.best, s.middle))
        shown.add_row(s.method, str(s.trials), *figures)
    return shown


def _runner_up(second: Standing) -> str:
    return "" if second.best is None else f", next {second.method} {second.best:.4f}"
