"""Points that a search tries first.

    start: [{optimizer.lr: 1.0, method.kappa: 0.7}, {method.name: dp_sgd, optimizer.lr: 2.0}]
    start: published

A point names some of the searched keys; the others are drawn by the sampler. Where methods or
budgets go in turn, each of them tries the points that are about it, in the order of the file.
"""

import json
import random
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from dpsweep.config.explain import format_value
from dpsweep.config.source import Source, Tree
from dpsweep.config.space.conditions import Condition
from dpsweep.config.space.domains import Draw, Labels, OneOf, Range, Slot, Space
from dpsweep.config.space.points import Corner, RandomDraw
from dpsweep.config.space.searched import resolve_key_aliases
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, guess
from dpsweep.methods import METHODS

Point = Mapping[str, Any]
"""Dotted key -> value."""

PUBLISHED = "published"
_DRAWS = 1000


class OutsideSpaceError(ValueError):
    """A point that is not in the space; says which of its keys, and why."""


class PartialFixedDraw:
    """Takes the values of a point, and has another draw the rest.

    Attributes:
        used: Keys of the point that were asked for.
        asked: All keys that were.
        elsewhere: True if it is not the turn of what the point is about.
    """

    def __init__(self, point: Point, other: Draw) -> None:
        self._point, self._other = point, other
        self.used: set[str] = set()
        self.asked: set[str] = set()
        self.elsewhere = False

    def number(self, slot: Slot, domain: Range) -> float | int:
        """The point's number, if it has one."""
        value = self._taken(slot)
        return (
            self._other.number(slot, domain)
            if value is None
            else require_in_range(value, slot, domain)
        )

    def option(self, slot: Slot, labels: Labels) -> int:
        """The point's option, if it names one."""
        value = self._taken(slot)
        return (
            self._other.option(slot, labels) if value is None else find_option(value, slot, labels)
        )

    def turn(self, slot: Slot, labels: Labels) -> int:
        """The point's own, if it names one; `elsewhere` if it is the turn of another."""
        turn, value = self._other.turn(slot, labels), self._taken(slot)
        index = turn if value is None else find_option(value, slot, labels)
        self.elsewhere |= index != turn
        return index

    def _taken(self, slot: Slot) -> Any:
        self.asked.add(slot.key)
        if slot.key in self._point:
            self.used.add(slot.key)
        return self._point.get(slot.key)


def require_in_range(value: Any, slot: Slot, domain: Range) -> float | int:
    """A given number, if the range has it.

    Raises:
        OutsideError: If it has not.
    """
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
    """Where a given value stands in a list.

    Raises:
        OutsideError: If it is not there.
    """
    label = value if isinstance(value, str | int | float | bool) else json.dumps(value)
    if label not in labels:
        listed = ", ".join(map(str, labels))
        raise OutsideSpaceError(
            f"{slot.key} = {format_value(value)} is none of the searched {listed}"
        )
    return labels.index(label)


class SearchedSweep(Protocol):
    """What is asked of a sweep here."""

    @property
    def file(self) -> Source:
        """The sweep file."""

    @property
    def base(self) -> Source:
        """The base config."""

    @property
    def space(self) -> Space:
        """What varies."""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What a trial has to meet."""

    def trial(self, tree: Tree) -> TrialConfig:
        """The config of a drawn tree."""

    def admits(self, trial: TrialConfig) -> bool:
        """True if it meets the conditions."""


def read_start(
    written: Literal["published"] | list[dict[str, Any]], sweep: SearchedSweep
) -> tuple[Point, ...]:
    """The points of a sweep file, checked.

    Raises:
        ConfigError: Naming the point, and its key at fault.
    """
    if written == PUBLISHED:
        return tuple(point for point in _get_published_points(sweep) if _is_feasible(point, sweep))
    points = list[Point]()
    for i, listed in enumerate(written if isinstance(written, list) else []):
        point, place = {resolve_key_aliases(key): v for key, v in listed.items()}, ("start", i)
        try:
            check_point(point, sweep)
        except OutsideSpaceError as e:
            raise ConfigError(f"{sweep.file.at(place)}: {e}") from e
        if not _is_feasible(point, sweep):
            raise ConfigError(
                f"{sweep.file.at(place)}: {format_value(listed)} does not meet "
                f"{' and '.join(c.formula.text for c in sweep.conditions)} (where)"
            )
        points.append(point)
    return tuple(points)


def check_point(point: Point, sweep: SearchedSweep) -> None:
    """Raises OutsideError if no branch of the space has the point's keys and values."""
    first = Corner()
    sweep.space.draw(sweep.base.tree, first)
    asked = set[str]()
    for corner in (Corner(), *first.others()):
        draw = PartialFixedDraw(point, corner)
        sweep.space.draw(sweep.base.tree, draw)
        if draw.used == set(point):
            return
        asked |= draw.asked
    lost = [key for key in point if key not in asked]
    if lost:
        raise OutsideSpaceError(f"{lost[0]} is not searched here.{guess(lost[0], asked)}")
    raise OutsideSpaceError(
        f"{', '.join(point)} are searched in different branches, never together"
    )


def _is_feasible(point: Point, sweep: SearchedSweep) -> bool:
    """True if some completion of the point meets the conditions."""
    if not sweep.conditions:
        return True
    rng = RandomDraw(random.Random(0))
    trees = (
        sweep.space.draw(sweep.base.tree, PartialFixedDraw(point, rng))[0] for _ in range(_DRAWS)
    )
    return any(sweep.admits(sweep.trial(tree)) for tree in trees)


def _get_published_points(sweep: SearchedSweep) -> list[Point]:
    """For each method of the space, the defaults of its tunables, which are the papers' own."""
    points: list[Point] = []
    whole = sweep.space.domains.get(()) or sweep.space.domains.get(("method",))
    labels = [branch.label for branch in whole.branches] if isinstance(whole, OneOf) else []
    first = sweep.trial(sweep.space.draw(sweep.base.tree, Corner())[0])
    for label in labels or [first.method.name]:
        if label not in METHODS:
            continue
        point: dict[str, Any] = {"method.name": label} if labels else {}
        defaults = METHODS[label].config().model_dump(mode="json", exclude_none=True)
        for name, value in defaults.items():
            try:
                check_point({**point, f"method.{name}": value}, sweep)
            except OutsideSpaceError:
                continue  # not searched, or the published value is not in the range
            point[f"method.{name}"] = value
        if set(point) - {"method.name"}:
            points.append(point)
    return points
