"""Configuration of a sweep's budget: trials, exploring trials, repeats of the best config."""

from typing import Any, Self

from pydantic import Field, model_validator

from dpsweep.config.units import Duration, parse_duration
from dpsweep.core.errors import InvalidKey
from dpsweep.core.strict import Strict, is_unused


class ExploreConfig(Strict):
    """Noisy trials that choose a config, before one final run is trained at it."""

    trials: int = Field(gt=0)
    """Exploring trials, failed and pruned ones included."""

    share: float = Field(default=0.05, gt=0, lt=1)
    """Cost of all exploring trials together, as a share of the squared noise-to-signal budget (mu
    squared of the Gaussian limit); the final run has the rest. 0.05 leaves it 97 % of epsilon 4."""


class BudgetConfig(Strict):
    """Number of trials, and the time that one may take."""

    trials: int = Field(default=0, gt=0)
    """Trials in all, failed and pruned ones included; with `explore`, that has the number."""

    explore: ExploreConfig | None = Field(default=None, exclude_if=is_unused)
    """Under privacy.scope: sweep: so many trials with much noise, which together cost a small share
    of epsilon, and then one final run with the rest, whose model is exported."""

    hours: float | None = Field(default=None, gt=0)
    """After so many hours no new trial starts; those that run go on to their end. With `confirm`
    the best are then repeated, which ends the search: it goes on with larger budget.trials alone,
    or results would decide how many runs there are."""

    trial_timeout: Duration | None = None
    """A trial that reports nothing for so long (30m, 90s, 2h) is ended and counts as failed. Give
    several times what an epoch takes (plan tells); without it a trial that hangs stays for ever."""

    @model_validator(mode="before")
    @classmethod
    def _explore_has_the_number(cls, data: Any) -> Any:
        match data:
            case {"explore": {}, "trials": _}:
                raise InvalidKey(
                    "trials",
                    "is given beside explore, which says how many trials explore. Delete "
                    "one of the two",
                )
            case {"explore": {"trials": int(trials)}} if trials > 0:  # else explore says why not
                return {**data, "trials": trials}
        return data

    @model_validator(mode="after")
    def _trials_are_given(self) -> Self:
        if self.trials == 0:
            raise InvalidKey(
                "trials", "is missing. Write how many trials to run, such as trials: 16"
            )
        return self

    @property
    def silence_seconds(self) -> float | None:
        """Seconds of `trial_timeout`."""
        return parse_duration(self.trial_timeout) if self.trial_timeout else None


class ConfirmConfig(Strict):
    """Repeats of the best config with fresh noise, each charged as a trial is."""

    top: int = Field(default=1, gt=0)
    """Configs that are repeated (of each epsilon, where there are several). Repeats say honestly
    what a config is worth; to find a better one, more trials do more than repeats of several."""

    each_method: bool = False
    """True if each method of a search over several has its `top` repeated, to compare them, or
    only the best of all."""

    seeds: int = Field(default=5, ge=2)
    """Runs of each, under secrets of their own and, but for held-out data, public seeds 1, 2, ...
    above the config's."""
