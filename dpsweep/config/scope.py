"""Checks of `privacy.scope` and `accounting`, and the noise that a shared budget leaves."""

from functools import reduce
from typing import Any

from dpsweep.config.explain import format_value
from dpsweep.config.keys import format_path
from dpsweep.config.source import Source
from dpsweep.config.space.domains import Choice, OneOf, Space
from dpsweep.config.space.searched import EPSILON_PATH
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.strict import Strict
from dpsweep.privacy.search_budget import SearchBudget

_NEEDED: dict[tuple[str, ...], tuple[Any, str, str]] = {
    ("sampler", "name"): (
        "random",
        "the proof is about trials drawn independently from one law",
        "Write sampler: {name: random}",
    ),
    ("pruner", "name"): (
        "none",
        "a trial would end by what others reported, which must stay unseen",
        "Write pruner: {name: none}",
    ),
    ("confirm",): (
        None,
        "only the winner is released, so there are no best trials to repeat",
        "Delete confirm",
    ),
    ("budget", "hours"): (
        None,
        "the number of trials follows a law that a clock would change",
        "Delete budget.hours",
    ),
    ("budget", "trial_timeout"): (
        None,
        "a trial that took too long could not win, and how long one takes depends on the machine",
        "Delete budget.trial_timeout",
    ),
    ("resources", "memory"): (
        None,
        "a trial that needs more is ended, so who may win would depend on the machine",
        "Delete resources.memory",
    ),
    ("start",): (
        [],
        "a config that is tried first is not drawn from the law of the others",
        "Delete start",
    ),
    ("learn_from",): (
        None,
        "trials are drawn from one law, and learn nothing",
        "Delete learn_from, and leave out --from",
    ),
    ("objective", "metrics"): (
        None,
        "one winner is released, and a front has many",
        "Write objective: {metric: valid/accuracy}",
    ),
}
"""Key of a sweep file -> what private selection needs there, why, and what to type."""

_NEEDED_TO_EXPLORE: dict[tuple[str, ...], tuple[Any, str, str]] = {
    ("accounting",): (
        "composition",
        "the exploring trials and the final run are all looked at, and add up",
        "Write accounting: composition",
    ),
    ("confirm",): (
        None,
        "the final run is trained afresh with all that is left of epsilon, so repeats have none",
        "Delete confirm",
    ),
    ("objective", "metrics"): (
        None,
        "one config is chosen for the final run, and a front has many",
        "Write objective: {metric: valid/accuracy}",
    ),
}
"""The same for `budget.explore`."""


def check_shared(epsilon: float, accounting: str, space: Space, file: Source, base: Source) -> None:
    """Raise ConfigError where a sweep with `scope: sweep` asks for another budget besides."""
    if accounting == "none":
        raise ConfigError(
            f"{file.at(('accounting',))}: none charges the chosen trial alone, but "
            f"privacy.scope: sweep makes epsilon {epsilon:g} the budget of all trials together. "
            f"Write accounting: composition, or privacy.scope: trial"
        )
    if EPSILON_PATH in space.domains:
        raise ConfigError(
            f"{base.at(EPSILON_PATH)}: each gives every trial one of several budgets, but "
            f"privacy.scope: sweep has one budget for all trials together. Write one number, such "
            f"as epsilon: {epsilon:g}, or privacy.scope: trial"
        )


def with_own_noise(
    config: TrialConfig, whole: SearchBudget, origin: Source, *, final: bool = False
) -> TrialConfig:
    """A trial that can be trained by itself: the noise of its share, and an epsilon of its own.

    Args:
        origin: Where its values come from.
        final: True for the run that follows the exploring ones.

    Raises:
        ConfigError: If the budget is too small for any noise.
    """
    try:
        noise = whole.noise(config.steps_and_rate, final=final)
    except InvalidKey as e:
        raise ConfigError(f"{origin.at(tuple(e.key.split('.')))}: {e}.") from e
    own = {"scope": "trial", "epsilon": None, "noise_multiplier": noise}
    return config.model_copy(update={"privacy": config.privacy.model_copy(update=own)})


def check_explore(config: Strict, trial: TrialConfig, file: Source, base: Source) -> None:
    """Raises ConfigError for what does not go with `budget.explore` in a sweep file.

    Args:
        trial: A trial with its privacy as the file has it.
    """
    if trial.privacy.scope == "trial":
        raise ConfigError(
            f"{base.at(('privacy', 'scope'))}: trial gives each run an epsilon of its own, but "
            f"budget.explore shares one among all runs. Write privacy: {{epsilon: 4, scope: "
            f"sweep}} in the base, say, or give budget.trials in place of explore"
        )
    for key, (needed, why, remedy) in _NEEDED_TO_EXPLORE.items():
        got = reduce(getattr, key, config)
        if got != needed:
            raise ConfigError(
                f"{file.at(key)}: {format_value(got)} goes against budget.explore: {why}. "
                f"{remedy}, or give budget.trials in place of explore"
            )


def check_charged(validation: str, accounting: str, file: Source) -> None:
    """Raise ConfigError if a choice by private examples is not charged at all."""
    if accounting == "none" and validation == "holdout":
        raise ConfigError(
            f"{file.at(('accounting',))}: none says that the validation data are public, but "
            f"data.validation: holdout measures with private examples. Write accounting: "
            f"composition, or data.validation: test_split"
        )


def check_selection(config: Strict, space: Space, file: Source, base: Source) -> None:
    """Raise ConfigError where a sweep file with `accounting: private_selection` is not one."""

    def refuse(place: str, got: Any, why: str, remedy: str) -> None:
        raise ConfigError(
            f"{place}: {format_value(got)} goes against accounting: private_selection: {why}. "
            f"{remedy}, or accounting: composition"
        )

    for key, (needed, why, remedy) in _NEEDED.items():
        got = reduce(getattr, key, config)
        if got != needed:
            refuse(file.at(key), got, why, remedy)
    for path, domain in space.domains.items():
        if path == EPSILON_PATH:
            why = "trials of several budgets do not follow one law"
            refuse(base.at(path), "each", why, "Write one number")
        elif isinstance(domain, Choice | OneOf) and domain.in_turn:
            why = "trials in turn are not drawn independently from one law"
            typed = format_path(path) or "each_of"
            refuse(file.at(("search", typed)), "each_of", why, "Write one_of")
