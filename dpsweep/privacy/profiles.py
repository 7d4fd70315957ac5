"""Privacy profiles of runs, and what private selection costs by them.

The profile d of a run is the smallest delta at each epsilon, in the worse of the two directions
(add one example, remove one). Private selection draws K from a geometric law on 1, 2, ... with
mean m, runs K times, and releases the best. With

    d(e_1) <= (exp(e_1) - 1) / (m - 1)      and      m d(e_2) <= delta

releasing the best is (e_2 + 2 e_1, delta)-DP (after Koskela, Redberg and Wang 2024, "Privacy
profiles for private selection", arXiv:2402.06701; proof in docs/concepts/accounting.md). It holds
for a random config from a public law if both lines hold for every config of the law: the profile
of a mixture with public weights is at most the largest among its parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Self

from dpsweep.privacy.accounting import Run, compose_alike, delta_of, epsilon_of
from dpsweep.privacy.renyi import RunCap

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_ROUNDING = 1e-9
_LEAST_RATIO = 1e-300  # a profile may be 0, which has no logarithm


def profile_delta(run: Run, epsilon: float) -> float:
    """Delta of a whole run at `epsilon`, from above; 1 without noise."""
    if run.noise_multiplier == 0:
        return 1.0
    return delta_of(_profile(run), epsilon, run.steps)


@lru_cache(maxsize=64)
def _profile(run: Run) -> PrivacyLossDistribution:
    # A grid of 4 % of the standard deviation of a step's loss, which is about mu / sqrt(T): the
    # rounding error falls with the square of that share. Not finer than for mu = 0.1.
    interval = min(1e-3, 0.04 * min(1.0, max(0.1, run.limit_mu)) / math.sqrt(run.steps))
    return compose_alike(run.one_step(interval), run.steps)


@dataclass(frozen=True)
class ProfileCap(RunCap):
    """The most that the profile of one run may be at two epsilons, fixed before the first run.

    Attributes:
        epsilons: e_1 and e_2.
        limits: Delta at each, at most.
    """

    epsilons: tuple[float, float]
    limits: tuple[float, float]

    @classmethod
    def at(cls, epsilons: tuple[float, float], mean: float, delta: float) -> Self:
        """The cap that proves (e_2 + 2 e_1, delta) for a mean number of runs."""
        first = math.expm1(epsilons[0]) / (mean - 1) if mean > 1 else 1.0
        return cls(epsilons, (min(1.0, first), delta / mean))

    @classmethod
    def over(cls, runs: Sequence[Run], mean: float, delta: float, margin: float = 0.0) -> Self:
        """The cap of the smallest epsilons that let all `runs` through, widened by `margin`."""
        first = max(_first_epsilon(run, mean) for run in runs)
        second = max(_epsilon_of(run, delta / mean) for run in runs)
        return cls.at(((1 + margin) * first, (1 + margin) * second), mean, delta)

    @property
    def epsilon(self) -> float:
        """Epsilon of releasing the best, if every run stays within the cap."""
        return self.epsilons[1] + 2 * self.epsilons[0]

    def excess(self, run: Run, kept_back: float = 0.0) -> float:
        """At the epsilon where it is larger."""
        pairs = zip(self.epsilons, self.limits, strict=True)
        ratios = (profile_delta(run, e) / (limit * (1 - kept_back)) for e, limit in pairs)
        return math.log(max(_LEAST_RATIO, *ratios))


def _epsilon_of(run: Run, delta: float) -> float:
    """Smallest epsilon at which the profile is at most `delta`; infinite without noise."""
    if run.noise_multiplier == 0:
        return math.inf
    return epsilon_of(_profile(run), delta, run.steps) * (1 + _ROUNDING)


def _first_epsilon(run: Run, mean: float) -> float:
    """Smallest e_1 that the first line allows for a mean number of runs; 0 for a single one."""
    from scipy.optimize import brentq

    def excess(epsilon: float) -> float:
        return profile_delta(run, epsilon) * (mean - 1) - math.expm1(epsilon)

    # d is at most 1, so e_1 = log(mean) always will do.
    root = float(brentq(excess, 0.0, math.log(mean) + _ROUNDING)) if mean > 1 else 0.0
    while excess(root) > 0:
        root = root * (1 + _ROUNDING) + _ROUNDING
    return root
