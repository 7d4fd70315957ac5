"""Accounting of a whole search: its epsilon, and the noise with which its runs keep a budget.

    composition         all runs may be looked at, each chosen knowing the ones before: their
                        divergences add up. All get equal shares, or all but the last one explore:
                        together they get a small share, and the last one has the rest
    private_selection   K like random runs, K geometric with a given mean and never told, of which
                        only the best is released. Two proofs, of which the one that costs less is
                        chosen before the first run: privacy profiles (privacy/profiles.py), or
                        Renyi (Papernot and Steinke 2022, arXiv:2110.03620, theorem 2, eta = 1):

        D'_a = D_a + log(mean) / (a - 1) + min over b of 2 (1 - 1/b) D_b + 2 log(mean) / b

A random run may draw its sampling rate and length too, from a law that knows nothing of the data:
it is then a mixture with its weights in public, whose D_a is at most the largest among its parts.
In dp-accounting's words: `RepeatAndSelectDpEvent(event, mean, shape=1)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from dpsweep.core.errors import InvalidKey
from dpsweep.privacy.accounting import Run, calibrate_noise, compose_runs
from dpsweep.privacy.profiles import ProfileCap
from dpsweep.privacy.renyi import (
    Cap,
    RunCap,
    divergence_at,
    epsilon_at,
    find_least_noise,
)

if TYPE_CHECKING:
    import numpy as np

Charged = Literal["composition", "private_selection"]

Schedule = tuple[int, float]
"""T and q of a run."""

_ROUNDING = 1e-9  # of a noise multiplier that another machine calibrated

MARGIN = 0.01
"""Share by which a run inside a space may lose more than one at its corners; no other is run."""


def draw_num_trials(mean: float, rng: np.random.Generator) -> int:
    """Draw the number of trials of a private selection: geometric on 1, 2, 3, ...

        P(K = k) = (1 - 1/mean)^(k-1) / mean

    It is the law that dp-accounting's `RepeatAndSelectDpEvent` of shape 1 assumes, which never
    draws 0. K is a secret, and so is each run's place in the order: neither may be stored where
    it is shown, and `rng` must be seeded by the operating system.

    Args:
        mean: Expected number of trials, >= 1.
        rng: A secret stream.
    """
    return int(rng.geometric(1 / mean))


def total_epsilon(charged: Charged, cap: Cap, num_runs: float, delta: float) -> tuple[float, Cap]:
    """Epsilon of a whole search whose every run stays within `cap`, by Renyi, and what it needs.

    Args:
        charged: How the search is charged.
        cap: The cap of each run, at any number of orders.
        num_runs: How many runs; for private selection, their mean number.
        delta: In (0, 1).

    Returns:
        Epsilon, and `cap` at the one or two orders that prove it.
    """
    import numpy as np

    orders_A, limits_A = np.array(cap.orders), np.array(cap.limits)
    if charged == "composition":
        total_A, needed = num_runs * limits_A, tuple[float, ...]()
    else:
        # the theorem's two orders are chosen apart: the second minimum does not depend on a
        extra_A = 2 * (1 - 1 / orders_A) * limits_A + 2 * math.log(num_runs) / orders_A
        best = int(np.argmin(extra_A))
        total_A = limits_A + math.log(num_runs) / (orders_A - 1) + extra_A[best]
        needed = (cap.orders[best],)
    epsilons = [epsilon_at(a, d, delta) for a, d in zip(cap.orders, total_A, strict=True)]
    first = int(np.argmin(epsilons))
    needed = tuple(sorted({cap.orders[first], *needed}))
    return epsilons[first], cap.at(needed)


def find_selection_cap(
    runs: Iterable[Run], mean: int, delta: float, margin: float = 0.0
) -> tuple[float, RunCap]:
    """Epsilon of a private selection among runs like `runs`, and the cap that proves it.

    The smaller of both proofs' figures; both follow from `runs` alone, before any has begun.

    Args:
        runs: Those at the corners of the space.
        mean: Mean number of runs.
        delta: In (0, 1).
        margin: How much more than `runs` others may lose.
    """
    runs = list(runs)
    # choosing the smaller is free: neither figure has seen any data
    by_profile = ProfileCap.over(runs, mean, delta, margin)
    by_renyi = total_epsilon("private_selection", Cap.over(runs, margin), mean, delta)
    return min((by_profile.epsilon, by_profile), by_renyi, key=lambda found: found[0])


def selection_epsilon(cap: RunCap, mean: int, delta: float) -> tuple[float, str]:
    """Epsilon of a private selection whose every run keeps `cap`, and the name of its proof."""
    if isinstance(cap, ProfileCap):
        return cap.epsilon, "privacy profiles"
    assert isinstance(cap, Cap), cap
    return total_epsilon("private_selection", cap, mean, delta)[0], "RDP"


def choose_cap(runs: Iterable[Run], charged: Charged, num_runs: int, delta: float) -> RunCap:
    """A cap for runs like `runs`, where it costs the whole search least.

    Args:
        runs: Those at the corners of the space.
        charged: How the search is charged.
        num_runs: How many runs; for private selection, their mean number.
        delta: In (0, 1).
    """
    if charged == "private_selection":
        return find_selection_cap(runs, num_runs, delta, MARGIN)[1]
    return total_epsilon(charged, Cap.over(runs, MARGIN), num_runs, delta)[1]


@dataclass(frozen=True)
class SearchBudget:
    """A budget that all runs of a search keep together.

    Where all runs have the same schedule and are composed, it is the budget of one run of num_runs
    times the steps, and tight. Otherwise each run is given the same share of it: a cap at orders
    (or, for private selection, epsilons) that are fixed before the first run, chosen so that over
    the `schedules` none needs much more noise than those best for it alone would ask for.

    Attributes:
        charged: How the search is charged.
        epsilon: Budget of the whole search.
        delta: Delta of the whole search.
        num_runs: How many runs; for private selection, their mean number.
        schedules: T and q of runs, at the ends of what the search may choose.
        vary: True if the search may choose them.
        share: What all runs but the last cost together, of the mu squared (or of the divergence)
            of all; None for equal shares.
    """

    charged: Charged
    epsilon: float
    delta: float
    num_runs: int
    schedules: tuple[Schedule, ...]
    vary: bool
    share: float | None = None

    @property
    def is_one_run(self) -> bool:
        """True if it is spent as by one long run."""
        return self.charged == "composition" and not self.vary

    @property
    def cap(self) -> RunCap:
        """Most that each run may lose, at orders or epsilons fixed beforehand.

        Where runs explore it is theirs, and `final_cap` is that of the last run.

        Raises:
            InvalidKey: If the budget is too small for any.
        """
        final = self.final_cap
        if self.share is None:
            return final
        assert isinstance(final, Cap), final
        part = self.share / ((self.num_runs - 1) * (1 - self.share))
        return Cap(final.orders, tuple(part * limit for limit in final.limits))

    @property
    def final_cap(self) -> RunCap:
        """Most that the last run may lose; the same as any other where shares are equal."""
        return _compute_cap(self)

    def noise(self, schedule: Schedule, *, final: bool = False) -> float:
        """The noise multiplier of a run, the least that keeps the budget.

        Args:
            schedule: T and q.
            final: True for the last run, where the others explore.

        Raises:
            InvalidKey: If the budget is too small for any.
        """
        return _compute_noise(self, schedule, final)

    def covers(self, runs: Iterable[Run]) -> bool:
        """True if these runs, and as many more as are left, keep the budget.

        Where runs explore, one of them may be the final run.
        """
        runs = list(runs)
        if self.charged == "composition" and len(runs) > self.num_runs:
            return False
        beyond = [run for run in runs if not self._keeps(run, final=False)]
        if self.share is None or len(beyond) > 1:
            return not beyond
        return all(self._keeps(run, final=True) for run in beyond)

    def _keeps(self, run: Run, *, final: bool) -> bool:
        if not self.is_one_run:
            return (self.final_cap if final else self.cap).admits(run)
        (schedule,) = self.schedules
        # a run that another machine calibrated may lie a rounding error below
        least = self.noise(schedule, final=final) * (1 - _ROUNDING)
        return (run.steps, run.sampling_rate) == schedule and run.noise_multiplier >= least


@lru_cache(maxsize=1024)
def _compute_noise(whole: SearchBudget, schedule: Schedule, final: bool) -> float:
    steps, rate = schedule
    if not whole.is_one_run:
        return (whole.final_cap if final else whole.cap).noise(steps, rate)
    assert (schedule,) == whole.schedules, f"{schedule} in a space of {whole.schedules} alone"
    if whole.share is not None:
        num_exploring = whole.num_runs - 1
        return explore_noise(whole.epsilon, whole.delta, schedule, num_exploring, whole.share)[
            final
        ]
    run, _ = calibrate_noise(whole.epsilon, whole.delta, rate, steps * whole.num_runs)
    return run.noise_multiplier


@lru_cache(maxsize=256)
def explore_noise(
    epsilon: float, delta: float, schedule: Schedule, num_exploring: int, share: float
) -> tuple[float, float]:
    """Noise multipliers of the exploring runs and of the final one, which compose to `epsilon`.

    A run of T steps has mu^2 = T q^2 (exp(1 / sigma^2) - 1) in the Gaussian limit (Bu et al. 2020,
    arXiv:1911.11607). The exploring runs together get `share` of the sum M, the final run the rest.
    M is the largest for which PLD(q, sigma_s)^(N T) * PLD(q, sigma_f)^T spends at most `epsilon`:
    the limit divides the budget, and the exact composition decides its size.

    Args:
        epsilon: Of all runs together.
        delta: In (0, 1).
        schedule: T and q, the same for all.
        num_exploring: N.
        share: In (0, 1).
    """
    from scipy.optimize import brentq

    steps, rate = schedule

    def levels(log_sum: float) -> tuple[float, float]:
        per_step = math.exp(log_sum) / (steps * rate**2)
        exploring, final = share * per_step / num_exploring, (1 - share) * per_step
        return math.log1p(exploring) ** -0.5, math.log1p(final) ** -0.5

    def excess(log_sum: float) -> float:
        exploring, final = (Run(rate, sigma, steps) for sigma in levels(log_sum))
        return math.log(compose_runs([*[exploring] * num_exploring, final], delta) / epsilon)

    alone, _ = calibrate_noise(epsilon, delta, rate, steps)
    start = 2 * math.log(alone.limit_mu)
    low, high = start - 0.2, start + 0.2
    while excess(low) > 0:
        low -= 0.4
    while excess(high) < 0:
        high += 0.4
    log_sum = float(brentq(excess, low, high, xtol=1e-4))
    while excess(log_sum) > 0:
        log_sum -= 1e-4
    return levels(log_sum)


@lru_cache(maxsize=64)
def _compute_cap(whole: SearchBudget) -> RunCap:
    import numpy as np

    try:
        caps = _candidates(whole)
    except ArithmeticError as e:
        raise InvalidKey(
            "privacy.epsilon",
            f"{whole.epsilon:g} is too little for {whole.num_runs} runs by {whole.charged}: no "
            f"amount of noise keeps it. Give more, or fewer trials",
        ) from e
    # the cap whose worst schedule needs the least noise beyond its own best
    noise = np.array([[cap.noise(*schedule) for schedule in whole.schedules] for cap in caps])
    regret = (noise / noise.min(0)).max(1)
    return caps[int(np.argmin(regret))]


def _candidates(whole: SearchBudget) -> list[RunCap]:
    """Caps that are best for one schedule each; by profiles alone if those are better at all."""
    renyi = {schedule: _choose_cap_for(whole, schedule) for schedule in whole.schedules}
    if whole.charged == "composition":
        return list(dict.fromkeys(renyi.values()))
    profiles = {schedule: _best_profile_for(whole, schedule) for schedule in whole.schedules}
    better = all(profiles[s].noise(*s) <= cap.noise(*s) for s, cap in renyi.items())
    return list(dict.fromkeys([*profiles.values(), *(() if better else renyi.values())]))


def _choose_cap_for(whole: SearchBudget, schedule: Schedule) -> RunCap:
    """The Renyi cap that would be best if all runs had this schedule."""
    steps, rate = schedule
    # A final run that has all but `share` is charged as 1 / (1 - share) equal runs would be.
    parts = whole.num_runs if whole.share is None else 1 / (1 - whole.share)

    def spent(sigma: float) -> tuple[float, Cap]:
        cap = Cap.over([Run(rate, sigma, steps)])
        return total_epsilon(whole.charged, cap, parts, whole.delta)

    sigma = find_least_noise(lambda sigma: math.log(max(spent(sigma)[0], 1e-9) / whole.epsilon))
    while (found := spent(sigma))[0] > whole.epsilon:
        sigma *= 1 + 1e-6
    if whole.charged == "private_selection":
        return found[1]
    (order,) = found[1].orders
    return Cap((order,), (divergence_at(order, whole.epsilon, whole.delta) / parts,))


def _best_profile_for(whole: SearchBudget, schedule: Schedule) -> RunCap:
    """The profile cap that would be best if all runs had this schedule."""
    steps, rate = schedule

    def spent(sigma: float) -> ProfileCap:
        return ProfileCap.over([Run(rate, sigma, steps)], whole.num_runs, whole.delta)

    sigma = find_least_noise(
        lambda sigma: math.log(max(spent(sigma).epsilon, 1e-9) / whole.epsilon)
    )
    while (found := spent(sigma)).epsilon > whole.epsilon:
        sigma *= 1 + 1e-6
    return found
