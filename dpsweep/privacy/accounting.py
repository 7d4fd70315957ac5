"""Accounting: epsilon of a run of DP steps, and the noise that keeps a budget.

A run is the T-fold composition of the Poisson-subsampled Gaussian mechanism (q, sigma), for
neighbours that differ by adding or removing one example. Its privacy loss distribution is
computed by Google's dp-accounting on a grid of `interval` width with pessimistic rounding
("connect the dots"), so every epsilon here is an upper bound. The rounding error falls with
the square of the width, so what halving the width still changes is three times what is left.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING

from dpsweep.core.cache import cached_numbers
from dpsweep.core.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

LEAST_EPSILON = 0.01
"""The least epsilon that noise is calibrated to, and that is settled in proportion."""

GRID_CHANGE = 0.009
"""Halving the grid goes on until it changes epsilon by less; a third of this error is left."""

SHORTFALL = 0.004
"""A calibrated run spends between target - SHORTFALL and target, by the accountant's figure."""

MOST_STEPS = 2 * 10**6
"""The longest run; calibrating it to epsilon 0.01 takes 10 seconds and less than a gigabyte."""

LEAST_NOISE = 0.1
"""The least noise multiplier but 0; the loss of one step at less has millions of grid points."""

_COARSEST, _FINEST = 8e-3, 1e-8
_LARGEST_EXPONENT = 700.0  # of expm1 in double precision, in round numbers

_MASS_CUT_OFF = -40.0  # log of the probability put at infinite loss: 4e-18 a step, on the safe side

_DEVIATIONS = 8.8  # of the noise, at that probability
_MOST_POINTS = 2**20  # of the loss of one step; of many steps it has a few times as many
_FLATTEST = -0.75
_MOST_CALIBRATED = 2**17  # the same for epsilons below 1, whose grid is halved a dozen times

HIDDEN_A_STEP = 2.0**-52
"""Probability that rounding may hide in each step of a composition.

T steps are composed by raising a spectrum to the power T, which multiplies its relative error by T.
Of T Gaussian steps, whose delta is known, up to 0.8e-16 T was hidden.
"""

LEAST_DELTA_A_STEP = 1e-14
"""Least delta over T: what rounding may hide is then 2 % of delta, and grids settle."""

_NEGLIGIBLE = 1e-4  # of delta: far less than calibration leaves unspent


@dataclass(frozen=True)
class Run:
    """One training run, as the accountant sees it.

    Attributes:
        sampling_rate: q = B / N, in (0, 1].
        noise_multiplier: sigma, in units of the clip norm; 0 is no privacy.
        steps: T.
    """

    sampling_rate: float
    noise_multiplier: float
    steps: int

    @property
    def limit_mu(self) -> float:
        """Mu of the central limit, q sqrt(T (exp(1 / sigma^2) - 1)) (Bu et al. 2020); no bound.

        https://arxiv.org/abs/1911.11607. Infinite without noise.
        """
        exponent = self.noise_multiplier**-2 if self.noise_multiplier else math.inf
        if exponent >= _LARGEST_EXPONENT:
            return math.inf
        return self.sampling_rate * math.sqrt(self.steps * math.expm1(exponent))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon for which the run is (epsilon, delta)-DP, from above; inf if none.

        >>> round(Run(sampling_rate=0.02, noise_multiplier=1.376, steps=2500).epsilon(1e-5), 2)
        3.67
        """
        return _compute_epsilon(self, delta)[0]

    def epsilons_spent(self, delta: float, after: Sequence[int]) -> list[float]:
        """Upper bounds on what the first t steps spend, for each t of `after`."""
        return list(_epsilons_spent(self, delta, tuple(after)))

    def epsilon_on_grid(self, delta: float, interval: float) -> float:
        """Epsilon on one grid, with whatever rounding error its width brings."""
        whole = compose_alike(self.one_step(interval), self.steps)
        return epsilon_of(whole, delta, self.steps)

    def one_step(self, interval: float) -> "PrivacyLossDistribution":
        """The privacy loss distribution of a single step.

        Raises:
            ConfigError: If its grid would have more than a million points.
        """
        from dp_accounting.pld import privacy_loss_distribution as pld  # a second, for whoever asks

        self.check_grid(interval, _MOST_POINTS)
        return pld.from_gaussian_mechanism(
            self.noise_multiplier,
            log_mass_truncation_bound=_MASS_CUT_OFF,
            value_discretization_interval=interval,
            sampling_prob=self.sampling_rate,
        )

    def check_grid(self, interval: float, most_points: int) -> None:
        """Raise ConfigError if the loss of a single step has more than `most_points` on a grid."""
        rate, noise = self.sampling_rate, self.noise_multiplier
        exponent = (1 + 2 * _DEVIATIONS * noise) / (2 * noise**2)
        largest = (
            math.log1p(rate * math.expm1(exponent)) if exponent < _LARGEST_EXPONENT else exponent
        )
        if largest > most_points * interval:
            raise ConfigError(
                f"privacy: {self.steps:,} steps at sampling rate {rate:.3g} with noise {noise:.3g} "
                f"lose up to {largest:.3g} a step, and counting that to {interval:.1g} takes "
                f"too long. Write a larger privacy.epsilon or privacy.delta, more "
                f"privacy.noise_multiplier if the file gives it, or a larger train.batch_size"
            )


def limit_noise(mu: float, steps: int, sampling_rate: float) -> float:
    """The noise multiplier whose central limit is mu-Gaussian: the inverse of `Run.limit_mu`.

    No bound: what calibration finds is higher, by a few percent in long runs, by 30 % in an epoch.
    """
    return 1 / math.sqrt(math.log1p((mu / sampling_rate) ** 2 / steps))


def compose_alike(one: "PrivacyLossDistribution", times: int) -> "PrivacyLossDistribution":
    """Compose a distribution with itself.

    `self_compose` of a sparse one computes size ** times before it turns dense: an integer of
    millions of digits for a million steps. Private attributes, as nothing public turns it dense.
    """
    if times > _FEW:
        for name in ("_pmf_remove", "_pmf_add"):
            setattr(one, name, getattr(one, name).to_dense_pmf())
    return one.self_compose(times)


def epsilon_of(whole: "PrivacyLossDistribution", delta: float, num_steps: int) -> float:
    """Epsilon of a composition of `num_steps` steps, at `delta` less what rounding may hide."""
    hidden = HIDDEN_A_STEP * num_steps
    if hidden > _NEGLIGIBLE * delta:
        delta -= hidden
    return float(whole.get_epsilon_for_delta(delta)) if delta > 0 else math.inf


def delta_of(whole: "PrivacyLossDistribution", epsilon: float, num_steps: int) -> float:
    """Delta of a composition of `num_steps` steps, with what rounding may hide."""
    found, hidden = float(whole.get_delta_for_epsilon(epsilon)), HIDDEN_A_STEP * num_steps
    return found + hidden if hidden > _NEGLIGIBLE * found else found


_FEW = 10  # 2 ** 10 is more than a sparse distribution may hold
_PACKAGES = ("dp-accounting", "numpy", "scipy")
"""Packages whose versions the figures kept on disk depend on."""


@lru_cache(maxsize=256)
@cached_numbers(*_PACKAGES)
def _epsilons_spent(run: Run, delta: float, after: tuple[int, ...]) -> list[float]:
    if run.noise_multiplier == 0:
        return [math.inf if t else 0.0 for t in after]
    one = run.one_step(1e-3)
    return [epsilon_of(compose_alike(one, t), delta, t) if t else 0.0 for t in after]


@lru_cache(maxsize=4096)
@cached_numbers(*_PACKAGES)
def _compute_epsilon(run: Run, delta: float) -> list[float]:
    if run.noise_multiplier == 0 or delta <= HIDDEN_A_STEP * run.steps:
        return [math.inf]
    found = _settle(
        lambda interval: run.epsilon_on_grid(delta, interval),
        min(_COARSEST, 1 / math.sqrt(run.steps)) / 2,
    )
    if found is None:
        raise ConfigError(
            f"privacy: what {run} loses at delta {delta:g} is not found. Write a larger "
            f"privacy.delta, or fewer train.epochs"
        )
    return [found]


def _settle(on_grid: Callable[[float], float], interval: float) -> float | None:
    """Halve a grid until that hardly changes its epsilon; None if the finest grid still does."""
    coarse = on_grid(interval)
    while interval > _FINEST and math.isfinite(coarse):
        interval /= 2
        fine = on_grid(interval)
        if coarse - fine <= _scale_tolerance(GRID_CHANGE, max(fine, LEAST_EPSILON)):
            return fine
        coarse = fine
    return None if math.isfinite(coarse) else coarse


def calibrate_noise(
    epsilon: float, delta: float, sampling_rate: float, steps: int
) -> tuple[Run, float]:
    """The run with the least noise that spends at most `epsilon`, and what it spends.

    What it spends, by a grid as fine as GRID_CHANGE asks for, lies within SHORTFALL under
    the target (0.4 % of it for targets below 1) and never above it.

    Args:
        epsilon: Target, > 0.
        delta: Failure probability, in (0, 1).
        sampling_rate: q, in (0, 1].
        steps: T, >= 1.

    Raises:
        ConfigError: If its privacy loss has too many grid points: the message says what to change.

    >>> run, spent = calibrate_noise(epsilon=4.0, delta=1e-5, sampling_rate=0.02, steps=2500)
    >>> round(run.noise_multiplier, 2), 3.99 < spent <= 4.0
    (1.3, True)
    """
    noise_multiplier, spent = _calibrate(epsilon, delta, sampling_rate, steps)
    return Run(sampling_rate, noise_multiplier, steps), spent


@lru_cache(maxsize=4096)
@cached_numbers(*_PACKAGES)
def _calibrate(epsilon: float, delta: float, sampling_rate: float, steps: int) -> list[float]:
    """Return the noise multiplier and what it spends."""
    if delta < LEAST_DELTA_A_STEP * steps:
        raise ConfigError(
            f"privacy.delta: {delta:g} is too small for {steps:,} steps: rounding may hide "
            f"{HIDDEN_A_STEP:.1e} of probability in each. Write delta: "
            f"{1.01 * LEAST_DELTA_A_STEP * steps:.2g} or more, or fewer steps"
        )
    slack = _scale_tolerance(SHORTFALL, epsilon)
    goal = epsilon - slack / 2

    def run(log_sigma: float) -> Run:
        return Run(sampling_rate, math.exp(log_sigma), steps)

    def spend(log_sigma: float, interval: float) -> float:
        run(log_sigma).check_grid(interval, _MOST_CALIBRATED if epsilon < 1 else _MOST_POINTS)
        return run(log_sigma).epsilon_on_grid(delta, interval)

    def miss(log_sigma: float, interval: float) -> float:
        return math.log(max(spend(log_sigma, interval), 1e-12) / goal)

    interval = min(_COARSEST, 0.2 * epsilon / math.sqrt(steps))  # wrong by 5 % or so
    start = 0.0  # on this grid, a run with far too little noise would take gigabytes
    while _approximate_epsilon(run(start + math.log(2)), delta) > 8 * goal:
        start += math.log(2)
    log_sigma = _find_root(lambda u: miss(u, interval), start)
    slope = (miss(log_sigma + 0.01, interval) - miss(log_sigma - 0.01, interval)) / 0.02
    if slope > _FLATTEST:  # of a few grid points; epsilon falls at least as fast as 1 / sigma
        slope = -1.0
    while interval > _FINEST:
        spent = spend(log_sigma, interval)
        meets = epsilon - slack <= spent <= epsilon
        if meets:
            change = spend(log_sigma, 2 * interval) - spent
            if change <= _scale_tolerance(GRID_CHANGE, epsilon):
                return [run(log_sigma).noise_multiplier, spent]
        if meets or abs(spent - goal) > _scale_tolerance(GRID_CHANGE, epsilon):
            interval /= 2
        log_sigma -= math.log(spent / goal) / slope
    raise ConfigError(
        f"privacy.epsilon: no noise is found for {epsilon:g} at privacy.delta {delta:g}, sampling "
        f"rate {sampling_rate:.3g} and {steps:,} steps. Write a larger epsilon or delta, or fewer "
        f"train.epochs"
    )


def compose_runs(runs: Iterable[Run], delta: float) -> float:
    """Epsilon of releasing everything of all `runs`, which were fixed beforehand.

    Runs that are all alike may be chosen one by one, knowing the ones before: then nothing is
    chosen but their number. Where sampling rates, noise or lengths are chosen so, see
    privacy/renyi.py.
    """
    counts = Counter(runs)
    if any(run.noise_multiplier == 0 for run in counts):
        return math.inf
    if len(counts) == 1:
        ((run, times),) = counts.items()
        return Run(run.sampling_rate, run.noise_multiplier, run.steps * times).epsilon(delta)
    return (
        _compute_composed_epsilon(tuple(sorted(counts.items(), key=repr)), delta)[0]
        if counts
        else 0.0
    )


@lru_cache(maxsize=256)
@cached_numbers(*_PACKAGES)
def _compute_composed_epsilon(counts: tuple[tuple[Run, int], ...], delta: float) -> list[float]:
    """Epsilon of many kinds of runs, each so many times."""
    num_steps = sum(run.steps * times for run, times in counts)
    if delta <= HIDDEN_A_STEP * num_steps:
        return [math.inf]

    def on_grid(interval: float) -> float:
        parts = [compose_alike(run.one_step(interval), run.steps * times) for run, times in counts]
        return epsilon_of(reduce(lambda a, b: a.compose(b), parts), delta, num_steps)

    found = _settle(on_grid, min(2e-3, 0.2 / math.sqrt(num_steps)))
    if found is None:
        raise ConfigError(
            f"privacy: what {num_steps:,} steps of {len(counts)} kinds lose at delta {delta:g} is "
            f"not found. Write a larger privacy.delta, or fewer train.epochs"
        )
    return [found]


def _scale_tolerance(error: float, epsilon: float) -> float:
    """Scale a tolerance: `error` for epsilons of 1 and more, in proportion below."""
    return error * min(1.0, epsilon)


def _approximate_epsilon(run: Run, delta: float) -> float:
    """Approximate epsilon by the central limit; no bound.

    The whole run is about mu-GDP, and such a mechanism spends about mu^2 / 2 +
    mu sqrt(2 log(1 / delta)).
    """
    mu = run.limit_mu
    return mu * (mu / 2 + math.sqrt(2 * math.log(1 / delta)))


def _find_root(miss: Callable[[float], float], start: float) -> float:
    """Find the zero of the decreasing `miss`, to 0.01, searching outwards from `start`."""
    from scipy.optimize import brentq

    low = high = start
    if miss(start) > 0:
        while miss(high := low + math.log(2)) > 0:
            low = high
    else:
        while miss(low := high - math.log(2)) < 0:
            high = low
    return float(brentq(miss, low, high, xtol=1e-2))
