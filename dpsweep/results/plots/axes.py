"""A searched key as an axis: numbers, numbers on a log scale, or categories in a row."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpsweep.config.space.domains import Choice, Range
from dpsweep.config.space.leaves import list_leaves
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.results.plots.style import key_title
from dpsweep.results.tables import format_cell
from dpsweep.search.trial_record import Record

_TICKS = 5
_LONG_WORD = 18


@dataclass(frozen=True)
class KeyAxis:
    """Axis of one searched key."""

    key: str  # dotted key of the trial config
    low: float  # smallest place
    high: float  # largest place; above `low`
    log: bool = False  # True if places are powers of ten
    words: tuple[str, ...] | None = None  # the categories in their order; None for numbers
    values: tuple[float, ...] = ()  # the places of numbers that are few; empty where they are many

    @property
    def title(self) -> str:
        """With the paper's letter and the unit."""
        return key_title(self.key)

    def place(self, value: Any) -> float | None:
        """Position of a value on the axis; None if there is no value."""
        if value is None:
            return None
        if self.words is not None:
            word = _word(value)
            return float(self.words.index(word)) if word in self.words else None
        return math.log10(value) if self.log else float(value)

    def ticks(self) -> tuple[list[float], list[str]]:
        """Places and what stands there: categories, the few values there are, or round numbers."""
        if self.words is not None:
            shown = [w if len(w) <= _LONG_WORD else w[: _LONG_WORD - 1] + "…" for w in self.words]
            return [float(i) for i in range(len(self.words))], shown
        places = list(self.values) or _round_ticks(self.low, self.high, log=self.log)
        return places, [f"{10**p if self.log else p:.4g}" for p in places]

    def layout(self, **more: Any) -> dict[str, Any]:
        """A plotly axis of places, with its title and ticks."""
        places, words = self.ticks()
        margin = 0.04 * (self.high - self.low) if self.words is None else 0.5
        return {
            "title": {"text": self.title},
            "tickvals": places,
            "ticktext": words,
            "range": [self.low - margin, self.high + margin],
            **more,
        }


def key_axes(sweep: ResolvedSweep, records: Sequence[Record]) -> dict[str, KeyAxis]:
    """An axis for each searched key that varied among `records`, in the order of the file."""
    found: dict[str, KeyAxis] = {}
    for leaf in list_leaves(sweep.space):
        key = leaf.slot.key
        if key not in found and (axis := _axis(key, leaf.domain, records)):
            found[key] = axis
    return found


def _axis(key: str, domain: Any, records: Sequence[Record]) -> KeyAxis | None:
    values = [r.hyperparams[key] for r in records if r.hyperparams.get(key) is not None]
    if len({_word(value) for value in values}) < 2:
        return None
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        log = isinstance(domain, Range) and domain.is_log
        spread = min(values) > 0 and max(values) >= 4 * min(values)
        log = log or (spread and not isinstance(domain, Range))
        places = [math.log10(v) if log else float(v) for v in values]
        few = tuple(sorted(set(places))) if len(set(places)) <= _TICKS else ()
        few = () if isinstance(domain, Range) and not domain.is_whole else few
        return KeyAxis(key, min(places), max(places), log, values=few)
    order = [_word(option) for option in domain.options] if isinstance(domain, Choice) else []
    words = {_word(value): value for value in values}
    ranked = sorted(words, key=lambda w: (order.index(w) if w in order else len(order), w))
    return KeyAxis(key, 0.0, float(len(ranked) - 1), words=tuple(ranked))


def _word(value: Any) -> str:
    if isinstance(value, dict) and len(value) > 1:
        return json.dumps(value)
    return format_cell(value)


def _round_ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Places of three to six round numbers between two places; the ends where there are none."""
    grids = _log_grids(low, high) if log else _even_grids(low, high)
    for grid in grids:
        inside = [p for p in grid if low - 1e-9 <= p <= high + 1e-9]
        if 3 <= len(inside) <= _TICKS + 1:
            return inside
    return [low, (low + high) / 2, high]


def _even_grids(low: float, high: float) -> Iterator[list[float]]:
    """Multiples of 1, 2 or 5 times a power of ten, the coarse ones first."""
    exponent = math.floor(math.log10(high - low)) + 1
    for power in (exponent, exponent - 1, exponent - 2):
        for nice in (5, 2, 1):
            step = nice * 10.0**power
            first = math.floor(low / step)
            yield [i * step for i in range(first, first + 2 * _TICKS + 10) if i * step <= high]


def _log_grids(low: float, high: float) -> Iterator[list[float]]:
    """Places of powers of ten, every nth where there are many; then of 1, 2, 5 times these."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    for apart in (4, 3, 2, 1):
        yield [float(e) for e in exponents if e % apart == 0]
    for nice in ((1, 3), (1, 2, 5), range(1, 10)):
        yield [math.log10(m) + e for e in exponents for m in nice]
