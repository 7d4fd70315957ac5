"""Suggesters of a space's values: its corners, at random, in turn, from a given point.

A suggester is a `Draw` (domains.py): `number`, `option`, and `choose_label` for what goes in turn.
Those that need Optuna, and the quasi-random start, stand in search/propose.py and quasi_random.py.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from dpsweep.config.explain import format_value
from dpsweep.config.space.domains import Draw, Labels, Range, Slot

Drawn = TypeVar("Drawn")

Point = Mapping[str, Any]
"""Dotted key -> value."""


class Corner:
    """Draws the `picks`-th end or option of each key, the first where nothing is said."""

    def __init__(self, picks: dict[str, int] | None = None) -> None:
        self.picks = picks or {}
        self.sizes: dict[str, int] = {}

    def number(self, slot: Slot, domain: Range) -> float | int:
        self.sizes[slot.name] = 2
        return (domain.low, domain.high)[self.picks.get(slot.name, 0)]

    def option(self, slot: Slot, labels: Labels) -> int:
        self.sizes[slot.name] = len(labels)
        return self.picks.get(slot.name, 0)

    choose_label = option

    def others(self) -> list["Corner"]:
        return [Corner({name: i}) for name, size in self.sizes.items() for i in range(1, size)]


def walk_corners(draw: Callable[[Corner], Drawn]) -> Iterator[Drawn]:
    """Yield what `draw` returns at each end and option, one at a time, the rest at their first."""
    seen = Corner()
    yield draw(seen)
    todo = seen.others()
    while todo:
        corner = todo.pop()
        yield draw(corner)
        new = {k: v for k, v in corner.sizes.items() if k not in seen.sizes}
        seen.sizes.update(new)
        todo += [Corner({**corner.picks, k: i}) for k, n in new.items() for i in range(1, n)]


class RandomDraw:
    """Draws at random, as the random sampler would."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def number(self, slot: Slot, domain: Range) -> float | int:
        if domain.is_whole:
            return self.rng.randint(int(domain.low), int(domain.high))
        if domain.is_log:
            return float(domain.low * (domain.high / domain.low) ** self.rng.random())
        return self.rng.uniform(domain.low, domain.high)

    def option(self, slot: Slot, labels: Labels) -> int:
        return self.rng.randrange(len(labels))

    choose_label = option


class RoundRobin:
    """Goes through all combinations of what is taken in turn, the first taken the fastest.

    >>> [[turns.take(2), turns.take(3)] for turns in map(RoundRobin, range(6))]
    [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]
    """

    def __init__(self, place: int) -> None:
        self.left, self.ways = place, 1

    def take(self, count: int) -> int:
        """Whose turn it is among `count`; afterwards `left` counts the rounds before.

        A round has `ways` places.
        """
        self.left, index = divmod(self.left, count)
        self.ways *= count
        return index


class InTurn(Corner):
    """Draws what goes in turn at a trial's place, and the first of all else."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.turns = RoundRobin(place)

    def choose_label(self, slot: Slot, labels: Labels) -> int:
        return self.turns.take(len(labels))


class OutsideSpaceError(ValueError):
    """A point that is not in the space; says which of its keys, and why."""


class PartialFixedDraw:
    """Takes the values of a point, and has another draw the rest."""

    def __init__(self, point: Point, other: Draw) -> None:
        self._point, self._other = point, other
        self.used: set[str] = set()  # keys of the point that were asked for
        self.asked: set[str] = set()  # all keys that were
        self.elsewhere = False  # True if it is not the turn of what the point is about

    def number(self, slot: Slot, domain: Range) -> float | int:
        """The point's number, if it has one."""
        value = self._point_value(slot)
        return (
            self._other.number(slot, domain)
            if value is None
            else require_in_range(value, slot, domain)
        )

    def option(self, slot: Slot, labels: Labels) -> int:
        """The point's option, if it names one."""
        value = self._point_value(slot)
        return (
            self._other.option(slot, labels) if value is None else find_option(value, slot, labels)
        )

    def choose_label(self, slot: Slot, labels: Labels) -> int:
        """The point's own, if it names one; `elsewhere` if it is the turn of another."""
        turn, value = self._other.choose_label(slot, labels), self._point_value(slot)
        index = turn if value is None else find_option(value, slot, labels)
        self.elsewhere |= index != turn
        return index

    def _point_value(self, slot: Slot) -> Any:
        self.asked.add(slot.key)
        if slot.key in self._point:
            self.used.add(slot.key)
        return self._point.get(slot.key)


def require_in_range(value: Any, slot: Slot, domain: Range) -> float | int:
    """A given number, if the range has it; OutsideSpaceError if it has not."""
    kinds = int if domain.is_whole else int | float
    if not isinstance(value, kinds) or isinstance(value, bool):
        what = "a whole number" if domain.is_whole else "a number"
        raise OutsideSpaceError(f"{slot.key} must be {what}, got {format_value(value)}")
    if not domain.low <= value <= domain.high:
        raise OutsideSpaceError(
            f"{slot.key} = {value} is outside the searched [{domain.low}, {domain.high}]"
        )
    return value if domain.is_whole else float(value)


def find_option(value: Any, slot: Slot, labels: Labels) -> int:
    """Find the position of a given value in a list; OutsideSpaceError if it is not there."""
    label = value if isinstance(value, str | int | float | bool) else json.dumps(value)
    if label not in labels:
        listed = ", ".join(map(str, labels))
        raise OutsideSpaceError(
            f"{slot.key} = {format_value(value)} is none of the searched {listed}"
        )
    return labels.index(label)
