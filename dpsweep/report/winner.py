"""Which of several methods won a search, and whether that is more than uneven trials or noise."""

from dataclasses import dataclass
from statistics import mean, median

from rich.table import Table

from dpsweep.report.plain import plain_table
from dpsweep.report.significance import LEVEL, gap_between
from dpsweep.tune.confirm import by_confirmed, confirmations, ranked
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
        repeats: Public seed and objective of each complete repeat of its best config.
    """

    method: str
    trials: int
    best: float | None
    middle: float | None
    repeats: tuple[tuple[int, float], ...] = ()

    @property
    def fresh(self) -> float | None:
        """Mean objective of the repeats; None without any."""
        return mean(value for _, value in self.repeats) if self.repeats else None


def standings(records: list[Record], direction: str) -> list[Standing]:
    """Methods of a search over several, the best first; empty for a search over one.

    They are ranked by fresh runs of their best configs if each has some, else by their best trials.
    """
    sign = -1 if direction == "maximize" else 1
    by_method: dict[str, list[Record]] = {}
    for record in records:
        if _KEY in record.knobs and record.confirms is None:
            by_method.setdefault(record.knobs[_KEY], []).append(record)
    table = [_standing(method, trials, records, sign) for method, trials in by_method.items()]
    by_fresh = _all_repeated(table)

    def place(s: Standing) -> tuple[bool, float]:
        return s.best is None, sign * ((s.fresh if by_fresh else s.best) or 0)

    table.sort(key=place)
    return table if len(table) > 1 else []


def verdict(table: list[Standing]) -> str:
    """Who is ahead, in a sentence; empty for a search over one method or without a result."""
    if not table or table[0].best is None:
        return ""
    counts = sorted({standing.trials for standing in table})
    if len(counts) == 1:
        return _sentence(table, f"under equal trials ({counts[0]} each)")
    return _sentence(table, f"with unequal trials ({counts[0]} to {counts[-1]} a method)") + (
        " each_of gives every method the same number, if budget.trials is a multiple."
    )


def standings_table(table: list[Standing]) -> Table:
    """One line a method."""
    repeated = any(s.repeats for s in table)
    shown = plain_table("By method")
    shown.add_column("method")
    for name in ("trials", "best", "median", *(("fresh runs", "runs") if repeated else ())):
        shown.add_column(name, justify="right")
    for s in table:
        figures = [s.best, s.middle, *([s.fresh] if repeated else [])]
        runs = [str(len(s.repeats))] if repeated else []
        words = ["–" if x is None else f"{x:.4f}" for x in figures]
        shown.add_row(s.method, str(s.trials), *words, *runs)
    return shown


def _standing(method: str, trials: list[Record], records: list[Record], sign: int) -> Standing:
    done = [r for r in ranked(trials, sign) if r.value is not None]
    if not done:
        return Standing(method, len(trials), None, None)
    values = [r.value for r in done if r.value is not None]
    best = by_confirmed(done, confirmations(records), sign)[0]
    repeats = [r for r in records if r.confirms == best.number and r.state == "complete"]
    return Standing(
        method,
        len(trials),
        values[0],
        median(values),
        tuple((r.config.seed, r.value) for r in repeats if r.value is not None),
    )


def _all_repeated(table: list[Standing]) -> bool:
    return all(s.repeats for s in table if s.best is not None)


def _sentence(table: list[Standing], evenness: str) -> str:
    first, second = table[:2]
    if not _all_repeated(table):
        return (
            f"{first.method} had the best trial {evenness}: {first.best:.4f}"
            f"{_runner_up(second, second.best)}. The best of noisy trials is a lucky one; "
            f"confirm: {{top: 1, seeds: 5, each_method: true}} runs the best of each again."
        )
    runs = "one fresh run" if len(first.repeats) == 1 else f"{len(first.repeats)} fresh runs"
    found = f"{first.fresh:.4f} in {runs}"
    if second.best is None:
        return f"{first.method} won {evenness}: {found}."
    p = gap_between(first.repeats, second.repeats).p
    found += _runner_up(second, second.fresh)
    if p is None:
        return f"{first.method} is ahead {evenness}: {found}; so few runs cannot tell them apart."
    if p < LEVEL:
        return f"{first.method} won {evenness}: {found} (p = {p:.2g}, by dpsweep compare's test)."
    return f"{first.method} is ahead {evenness}: {found}; noise could do that (p = {p:.2g})."


def _runner_up(second: Standing, figure: float | None) -> str:
    return "" if figure is None else f", next {second.method} {figure:.4f}"
