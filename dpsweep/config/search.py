"""Objective, sampler and pruner of a search."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from dpsweep.config.source import Source
from dpsweep.config.space.domains import Choice, OneOf, Space
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.strict import Strict

Measured = Literal[
    "valid/accuracy",
    "valid/loss",
    "valid/f1",
    "valid/matthews",
    "valid/mae",
    "valid/r2",
    "valid/perplexity",
    "valid/bleu",
    "valid/rouge_l",
]
Goal = Measured | Literal["seconds", "epsilon"]
_SMALL_IS_GOOD = {"valid/loss", "valid/mae", "valid/perplexity", "seconds", "epsilon"}
Direction = Literal["maximize", "minimize"]


class ObjectiveConfig(Strict):
    """Metric of a trial at its last epoch, or two metrics that are traded off."""

    metric: Measured = "valid/accuracy"
    """Measured on the declared validation data; one that data.task has. With `metrics`, the first
    of them."""

    metrics: Annotated[tuple[Measured, Goal], Field(strict=False)] | None = None
    """Two, in place of `metric`: such as [valid/accuracy, seconds] or [valid/accuracy, epsilon].
    What comes out is the front: trials that no other beats in both. The first orders tables."""

    @model_validator(mode="before")
    @classmethod
    def _parse_metrics(cls, data: Any) -> Any:
        match data:
            case {"metric": _, "metrics": [_, *_]}:
                raise InvalidKey("metric", "is given beside metrics. Delete one of the two")
            case {"metrics": [str(first), *_]} if first in get_args(Measured):
                return {**data, "metric": first}
        return data

    @model_validator(mode="after")
    def _check_metrics_differ(self) -> Self:
        if self.metrics and self.metrics[0] == self.metrics[1]:
            raise InvalidKey(
                "metrics", f"names {self.metrics[0]} twice. For one, write metric: ..."
            )
        return self

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The metrics, one or two."""
        return self.metrics or (self.metric,)

    @property
    def sign(self) -> int:
        """1 if a small value of the first is a good one, -1 if a large one is."""
        return -1 if self.direction == "maximize" else 1

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Direction of each of `goals`."""
        return tuple("minimize" if g in _SMALL_IS_GOOD else "maximize" for g in self.goals)

    @property
    def direction(self) -> Direction:
        """Direction of the first metric."""
        return self.directions[0]


class SamplerConfig(Strict):
    """Sampler that proposes the next trial."""

    name: Literal["tpe", "random", "qmc", "gp", "cmaes"] = "tpe"
    """tpe learns from finished trials, as do gp (a Gaussian process, for tens of trials) and cmaes
    (for hundreds, over ranges alone); random does not; qmc (Sobol) covers the space evenly."""

    startup_trials: int = Field(default=10, gt=0)
    """Trials before tpe, gp or cmaes begin to learn; at each budget of its own. They cover each key
    evenly, over what `where` admits, and so do the first four of every method in turn."""

    multivariate: bool = True
    """tpe: draws the keys together, so that it can learn how they depend on each other."""

    constant_liar: bool = True
    """tpe: keeps away from trials that still run, so that many at once do not try the same."""

    @property
    def learns(self) -> bool:
        """True if proposals depend on the results of earlier trials."""
        return self.name in ("tpe", "gp", "cmaes")


class PrunerConfig(Strict):
    """Pruner that ends weak trials early. A pruned trial has still spent its privacy."""

    name: Literal["none", "median", "successive_halving"] = "none"
    """median: worse than half of the others at that epoch; successive_halving: not in the best
    1 / reduction of its rung, and the default where budget.hours is given."""

    warmup_epochs: int = Field(default=1, ge=1)
    """Reports a trial may make before it can be ended."""

    reduction: int = Field(default=4, ge=2)
    """Of so many trials, one goes on (successive_halving)."""


def check_sampler(sampler: SamplerConfig, space: Space, where: str) -> None:
    """Raise ConfigError if the sampler cannot cover the space; `where` is file, line and key."""
    name = sampler.name
    if name in ("qmc", "gp", "cmaes") and space.is_conditional:
        raise ConfigError(
            f"{where}: {name} covers a space of fixed keys, and this one has a one_of or each_of. "
            f"Use sampler: {{name: tpe}} or {{name: random}}"
        )
    if name != "cmaes":
        return
    ours = {p: d for p, d in space.domains.items() if isinstance(d, Choice | OneOf)}
    chosen = [p for p, d in ours.items() if not d.in_turn]
    if chosen:
        key = ".".join(map(str, chosen[0]))
        raise ConfigError(
            f"{where}: cmaes covers ranges of numbers, and {key} is a choice. Give it a range, "
            f"such as log_integer, or use sampler: {{name: tpe}} or {{name: gp}}"
        )


def check_metrics(objective: ObjectiveConfig, measured: Sequence[str], file: Source) -> None:
    """Raise ConfigError if a trial does not measure what is searched for.

    Args:
        measured: Names of the task's metrics, without `valid/`.
    """
    for goal in objective.goals:
        if goal.startswith("valid/") and goal.removeprefix("valid/") not in measured:
            known = ", ".join(f"valid/{name}" for name in measured)
            raise ConfigError(
                f"{file.at(('objective',))}: {goal} is not measured by this task, which has "
                f"{known}. Write objective: {{metric: valid/{measured[0]}}}, or name it in "
                f"data.task.metrics if the task is classification"
            )


def check_goals(
    objective: ObjectiveConfig, sampler: SamplerConfig, pruner: PrunerConfig, file: Source
) -> None:
    """Raise ConfigError if two objectives are given to what knows one alone."""
    if len(objective.goals) < 2:
        return
    goals = " and ".join(objective.goals)
    if pruner.name != "none":
        raise ConfigError(
            f"{file.at(('pruner', 'name'))}: {pruner.name} ends trials that are behind, and with "
            f"two objectives ({goals}) none is behind for sure. Use pruner: {{name: none}}"
        )
    if sampler.name == "cmaes":
        raise ConfigError(
            f"{file.at(('sampler', 'name'))}: cmaes follows one objective, and there are two: "
            f"{goals}. Use sampler: {{name: tpe}} or {{name: gp}}"
        )


def check_epsilon_varies(
    objective: ObjectiveConfig, epsilons: tuple[float | None, ...], file: Source
) -> None:
    """Raise ConfigError if epsilon is an objective and all trials have the same."""
    if "epsilon" in objective.goals and epsilons[0] is not None and len(epsilons) == 1:
        raise ConfigError(
            f"{file.at(('objective', 'metrics'))}: epsilon is {epsilons[0]:g} for all trials, so "
            f"there is nothing to trade. Give privacy.epsilon: {{each: [1, 2, 4]}} in the base "
            f"config"
        )


def check_posterior(possible: bool, is_private_selection: bool, file: Source) -> None:
    """Raise ConfigError if the file asks for a choice by posterior where there can be none."""
    if not possible:
        why = (
            "accounting: private_selection is proven for the best result of single runs"
            if is_private_selection
            else "with two objectives a front comes out, and not one config"
        )
        raise ConfigError(f"{file.at(('choose',))}: posterior: {why}. Write choose: observed")
