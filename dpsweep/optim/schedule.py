"""Learning-rate schedules: public functions of the step alone."""

import math
from functools import lru_cache
from typing import Literal

from pydantic import Field

from dpsweep.core.strict import Strict


class _WarmUp(Strict):
    """A linear rise from 0 over the first steps."""

    warmup: float = Field(default=0.0, ge=0, lt=1)
    """Share of the run spent rising linearly to the peak."""

    def warm_up_factor(self, step: int, steps: int) -> float:
        """1 after the warm-up; before it, the (step + 1)-th of its equal stairs."""
        length = self.warmup * steps
        return min(1.0, (step + 1) / length) if length else 1.0


class Constant(_WarmUp):
    """lr after the warm-up."""

    name: Literal["constant"] = "constant"

    def factor(self, step: int, steps: int) -> float:
        """lr_t / lr at `step` of a run of `steps`."""
        return self.warm_up_factor(step, steps)


class Cosine(_WarmUp):
    """A half cosine from lr down to `final` * lr, after the warm-up.

    >>> half_way = Cosine(final=0.2).factor(step=50, steps=100)
    >>> round(half_way, 3)
    0.6
    """

    name: Literal["cosine"] = "cosine"

    final: float = Field(default=0.0, ge=0, le=1)
    """Share of lr that is left at the end."""

    def factor(self, step: int, steps: int) -> float:
        """lr_t / lr at `step` of a run of `steps`."""
        start = self.warmup * steps
        if step < start:
            return self.warm_up_factor(step, steps)
        through = (step - start) / (steps - start)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * through)) / 2


@lru_cache(maxsize=1024)
def sum_factors(schedule: Constant | Cosine, steps: int) -> float:
    """S = sum_t lr_t / lr over a run: the number of steps at the peak that go as far.

    >>> sum_factors(Constant(), 100), round(sum_factors(Cosine(), 100), 6)
    (100.0, 50.5)
    """
    return math.fsum(schedule.factor(step, steps) for step in range(steps))
