"""Points that a search tries first.

    start: [{optimizer.lr: 1.0, method.kappa: 0.7}, {method.name: dp_sgd, optimizer.lr: 2.0}]
    start: published

A point names some of the searched keys; the others are drawn by the sampler. Where methods or
budgets go in turn, each of them tries the points that are about it, in the order of the file.
"""

import random
from typing import Any, Literal, Protocol

from dpsweep.config.explain import format_value
from dpsweep.config.keys import METHOD_NAME
from dpsweep.config.source import Source, Tree
from dpsweep.config.space.conditions import Condition
from dpsweep.config.space.domains import OneOf, Space
from dpsweep.config.space.searched import resolve_key_aliases
from dpsweep.config.space.suggest import (
    Corner,
    OutsideSpaceError,
    PartialFixedDraw,
    Point,
    RandomDraw,
)
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, guess
from dpsweep.methods import METHODS

PUBLISHED = "published"
_DRAWS = 1000


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
        point: dict[str, Any] = {METHOD_NAME: label} if labels else {}
        defaults = METHODS[label].config().model_dump(mode="json", exclude_none=True)
        for name, value in defaults.items():
            try:
                check_point({**point, f"method.{name}": value}, sweep)
            except OutsideSpaceError:
                continue  # not searched, or the published value is not in the range
            point[f"method.{name}"] = value
        if set(point) - {METHOD_NAME}:
            points.append(point)
    return points
