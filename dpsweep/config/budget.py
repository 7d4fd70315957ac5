"""How much a sweep spends: on its search, and on repeats of the best config."""

from pydantic import Field

from dpsweep.config.units import Duration, parse_duration
from dpsweep.core.strict import Strict


class BudgetConfig(Strict):
    """Number of trials, and the time that one may take."""

    trials: int = Field(gt=0)
    """Trials in all, failed and pruned ones included."""

    hours: float | None = Field(default=None, gt=0)
    """After so many hours no new trial starts; those that run go on to their end. With `confirm`
    the best are then repeated, which ends the search: it goes on with larger budget.trials alone,
    or results would decide how many runs there are."""

    trial_timeout: Duration | None = None
    """A trial that reports nothing for so long (30m, 90s, 2h) is ended and counts as failed. Give
    several times what an epoch takes (plan tells); without it a trial that hangs stays for ever."""

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
    """Whether each method of a search over several has its `top` repeated, to compare them, or
    only the best of all."""

    seeds: int = Field(default=5, ge=2)
    """Runs of each, under secrets of their own and, but for held-out data, public seeds 1, 2, ...
    above the config's."""
