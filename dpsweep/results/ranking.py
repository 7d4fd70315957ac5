"""Which of several methods won a search, and whether that is more than uneven trials or noise."""

from dataclasses import dataclass
from statistics import mean, median

from rich.table import Table

from dpsweep.results.importance import LEAST_TRIALS
from dpsweep.results.rich_table import plain_table
from dpsweep.results.significance import LEVEL, gap_between, holm
from dpsweep.search.confirmation import best_of, ranked
from dpsweep.search.trial_record import Record

_KEY = "method.name"


@dataclass(frozen=True)
class Standing:
    """How one method did at one epsilon.

    Attributes:
        epsilon: What its trials were calibrated to; None where the noise was given.
        method: Its name.
        trials: All that were started.
        best: Objective of its best complete trial, or the posterior mean where that chooses; None
            if there is none.
        middle: Median of the same of its complete trials; None if there is none.
        repeats: Public seed and objective of each complete repeat of its best config.
    """

    epsilon: float | None
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
    """Methods of a search over several, the best of each epsilon first; empty for one over one.

    They are ranked by fresh runs of their best configs if each has some, else by their best trials.
    """
    sign = -1 if direction == "maximize" else 1
    groups: dict[tuple[float | None, str], list[Record]] = {}
    for record in records:
        if _KEY in record.hyperparams and record.confirms is None:
            groups.setdefault((record.epsilon, record.hyperparams[_KEY]), []).append(record)
    if len({method for _, method in groups}) < 2:
        return []
    table = [_standing(*key, trials, records, sign) for key, trials in groups.items()]
    return [standing for peers in _by_epsilon(table) for standing in _ordered(peers, sign)]


def verdict(table: list[Standing]) -> str:
    """Who is ahead, a sentence an epsilon; empty without several methods or a complete trial."""
    by_target = _by_epsilon(table)
    where = [
        f"At epsilon {peers[0].epsilon:g}, " if len(by_target) > 1 else "" for peers in by_target
    ]
    told = [
        at + _sentence(peers)
        for at, peers in zip(where, by_target, strict=True)
        if len(peers) > 1 and peers[0].best is not None
    ]
    if told and any(len({standing.trials for standing in peers}) > 1 for peers in by_target):
        told.append("each_of gives every method the same number, if budget.trials is a multiple.")
    return " ".join(told)


def standings_table(table: list[Standing]) -> Table:
    """One line a method."""
    repeated = any(s.repeats for s in table)
    several = len(_by_epsilon(table)) > 1
    shown = plain_table("By method")
    if several:
        shown.add_column("ε", justify="right")
    shown.add_column("method")
    for name in ("trials", "best", "median", *(("fresh runs", "runs") if repeated else ())):
        shown.add_column(name, justify="right")
    for s in table:
        figures = [s.best, s.middle, *([s.fresh] if repeated else [])]
        runs = [str(len(s.repeats))] if repeated else []
        words = ["–" if x is None else f"{x:.4f}" for x in figures]
        budget = [f"{s.epsilon:g}"] if several else []
        shown.add_row(*budget, s.method, str(s.trials), *words, *runs)
    return shown


def _standing(
    epsilon: float | None, method: str, trials: list[Record], records: list[Record], sign: int
) -> Standing:
    values = [r.merit for r in ranked(trials, sign) if r.value is not None]
    if not values:
        return Standing(epsilon, method, len(trials), None, None)
    _, repeats = best_of(trials, records, sign)
    return Standing(epsilon, method, len(trials), values[0], median(values), repeats)


def _by_epsilon(table: list[Standing]) -> list[list[Standing]]:
    """The smallest first."""
    by_target: dict[float | None, list[Standing]] = {}
    for standing in table:
        by_target.setdefault(standing.epsilon, []).append(standing)
    return [
        by_target[epsilon] for epsilon in sorted(by_target, key=lambda e: (e is None, e or 0.0))
    ]


def _ordered(peers: list[Standing], sign: int) -> list[Standing]:
    by_fresh = _all_repeated(peers)

    def place(s: Standing) -> tuple[bool, float]:
        return s.best is None, sign * ((s.fresh if by_fresh else s.best) or 0.0)

    return sorted(peers, key=place)


def _all_repeated(peers: list[Standing]) -> bool:
    return all(s.repeats for s in peers if s.best is not None)


def _sentence(peers: list[Standing]) -> str:
    """Of methods in order, of which the first has a complete trial."""
    first, second = peers[:2]
    counts = sorted({standing.trials for standing in peers})
    if len(counts) == 1:
        evenness = f"under equal trials ({counts[0]} each)"
    else:
        evenness = f"with unequal trials ({counts[0]} to {counts[-1]} a method)"
    if second.best is None:
        return f"Only {first.method} has a complete trial, {evenness}."
    if not _all_repeated(peers):
        return (
            f"{first.method} had the best trial {evenness}: {first.best:.4f}, next "
            f"{second.method} {second.best:.4f}. The best of noisy trials is a lucky one; fresh "
            f"runs of each method's best tell more (confirm: {{top: 1, seeds: 5, each_method: "
            f"true}})."
        )
    runs = "one fresh run" if len(first.repeats) == 1 else f"{len(first.repeats)} fresh runs"
    found = f"{evenness}: {first.fresh:.4f} in {runs}, next {second.method} {second.fresh:.4f}"
    p = _chance(peers)
    if p is None:
        return f"{first.method} is ahead {found}; these runs cannot tell them apart."
    if p >= LEVEL:
        return f"{first.method} is ahead {found}; noise could do that (p = {p:.2g})."
    if counts[0] < LEAST_TRIALS:
        return (
            f"{first.method} is ahead {found}; not by noise (p = {p:.2g}), but after so few trials "
            f"maybe by the luck of its search."
        )
    return f"{first.method} won {found} (p = {p:.2g})."


def _chance(peers: list[Standing]) -> float | None:
    """Of the first's lead over the second, corrected for all others as `compare` does.

    None if the test cannot say, or sees no lead.
    """
    first, *others = [s for s in peers if s.repeats]
    gaps = [gap_between(first.repeats, other.repeats) for other in others]
    if gaps[0].difference * ((first.fresh or 0) - (others[0].fresh or 0)) <= 0:
        return None
    return holm([gap.p for gap in gaps])[0]
