"""Points that a search tries first.

    start: [{optimizer.lr: 1.0, method.kappa: 0.7}, {method.name: dp_sgd, optimizer.lr: 2.0}]
    start: published
    start: defaults

A point names some of the searched keys; the others are drawn by the sampler. Where methods or
budgets go in turn, each of them tries the points that are about it, in the order of the file.
"""

import itertools
import random
from typing import Any, Final, Literal, Protocol

from dpsweep.config.explain import format_value
from dpsweep.config.keys import CLIP_NORM, EPSILON, FLOOR, METHOD_NAME, TOTAL_STEP
from dpsweep.config.privacy import GOOD_CLIP_NORM
from dpsweep.config.source import Source, Tree
from dpsweep.config.space.conditions import Condition
from dpsweep.config.space.domains import Choice, OneOf, Space
from dpsweep.config.space.searched import resolve_key_aliases
from dpsweep.config.space.suggest import (
    Corner,
    OutsideSpaceError,
    PartialFixedDraw,
    Point,
    RandomDraw,
)
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, suggest_names
from dpsweep.methods import METHODS

DEFAULTS: Final = "defaults"
_DRAWS = 1000


class SearchedSweep(Protocol):
    """Part of a sweep that this module reads."""

    @property
    def file(self) -> Source:
        """The sweep file."""

    @property
    def base(self) -> Source:
        """The base config."""

    @property
    def space(self) -> Space:
        """Searched keys."""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions that a trial has to meet."""

    def trial(self, tree: Tree) -> TrialConfig:
        """The config of a drawn tree."""

    def with_searched_noise(self, trial: TrialConfig) -> TrialConfig:
        """A trial with the noise that ranges and defaults are for."""

    def admits(self, trial: TrialConfig) -> bool:
        """True if it meets the conditions."""


def read_start(
    written: Literal["published", "defaults"] | list[dict[str, Any]], sweep: SearchedSweep
) -> tuple[Point, ...]:
    """The points of a sweep file, checked.

    Raises:
        ConfigError: Naming the point, and its key at fault.
    """
    if isinstance(written, str):
        points_ = _get_published_points(sweep, with_sizes=written == DEFAULTS)
        return tuple(point for point in points_ if _is_feasible(point, sweep))
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
    """Raise OutsideSpaceError if no branch of the space has the point's keys and values."""
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
        raise OutsideSpaceError(f"{lost[0]} is not searched here.{suggest_names(lost[0], asked)}")
    raise OutsideSpaceError(
        f"{', '.join(point)} are searched in different branches, never together"
    )


def is_complete(point: Point, sweep: SearchedSweep) -> bool:
    """True if the point leaves no searched key to the sampler."""
    draw = PartialFixedDraw(point, Corner())
    sweep.space.draw(sweep.base.tree, draw)
    return draw.asked <= set(point)


def _is_feasible(point: Point, sweep: SearchedSweep) -> bool:
    """True if some completion of the point meets the conditions."""
    if not sweep.conditions:
        return True
    rng = RandomDraw(random.Random(0))
    trees = (
        sweep.space.draw(sweep.base.tree, PartialFixedDraw(point, rng))[0] for _ in range(_DRAWS)
    )
    return any(sweep.admits(sweep.trial(tree)) for tree in trees)


def _get_published_points(sweep: SearchedSweep, with_sizes: bool) -> list[Point]:
    """For each method of the space, the defaults of its tunables, which are the papers' own.

    Args:
        with_sizes: Whether to add the default total step of each epsilon, and clip norm.
    """
    points: list[Point] = []
    whole = sweep.space.domains.get(()) or sweep.space.domains.get(("method",))
    labels = [branch.label for branch in whole.branches] if isinstance(whole, OneOf) else []
    first = sweep.trial(sweep.space.draw(sweep.base.tree, Corner())[0])
    budgets = sweep.space.domains.get(("privacy", "epsilon")) if with_sizes else None
    budget_points: list[Point] = [{}]
    if isinstance(budgets, Choice):
        budget_points = [{EPSILON: epsilon} for epsilon in budgets.options]
    for label, about in itertools.product(labels or [first.method.name], budget_points):
        if label not in METHODS:
            continue
        point: dict[str, Any] = {**({METHOD_NAME: label} if labels else {}), **about}
        own = METHODS[label].config().model_dump(mode="json", exclude_none=True)
        values = {f"method.{name}": value for name, value in own.items()}
        _add_searched(point, values, sweep)
        if with_sizes:
            _add_searched(point, {CLIP_NORM: GOOD_CLIP_NORM}, sweep)  # which a floor depends on
            drawn, _ = sweep.space.draw(sweep.base.tree, PartialFixedDraw(point, Corner()))
            trial = sweep.with_searched_noise(sweep.trial(drawn))
            floor = {FLOOR: trial.default_floor} if trial.optimizer.name == "adambc" else {}
            _add_searched(point, {**floor, TOTAL_STEP: trial.default_total_step}, sweep)
        if set(point) - {METHOD_NAME, EPSILON}:
            points.append(point)
    return points


def _add_searched(point: dict[str, Any], values: Point, sweep: SearchedSweep) -> None:
    """Add those values to a point that are searched, and in their range."""
    for key, value in values.items():
        try:
            check_point({**point, key: value}, sweep)
        except OutsideSpaceError:
            continue
        point[key] = value
