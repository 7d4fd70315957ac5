"""Renyi divergences of runs: what adds up even where each run is chosen knowing the ones before.

    A_a(q, sigma) = E (1 - q + q exp(z / sigma - 1 / (2 sigma^2)))^a,    z ~ N(0, 1)
    D_a(run)      = T log A_a / (a - 1)

D_a is the divergence of order a of T steps, for adding or removing one example (Mironov, Talwar
and Zhang 2019, arXiv:1908.10530, theorem 4). At one order that is fixed before the first step,
steps chosen one by one, each knowing all releases so far, lose at most b together if what they
may lose never sums to more than b (Feldman and Zrnic 2021, arXiv:2008.11193, theorem 3.1). Privacy
loss distributions have no such theorem: composed as they came out, they prove nothing about a
search that chose among them. (b, a) means (epsilon, delta) for every delta, with

    epsilon = b + log(1 - 1/a) - log(delta a) / (a - 1)

(Canonne, Kamath and Steinke 2020, arXiv:2004.00010, proposition 12).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Self

from dpsweep.privacy.accounting import Run

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *(1 + i / 40 for i in range(1, 40)),
    *(2 + i / 10 for i in range(60)),
    *(8 + i / 2 for i in range(48)),
    *(32, 36, 40, 45, 50, 57, 64, 72, 80, 90, 101, 114, 128, 144, 161, 181, 203, 228, 256),
    *(304, 362, 431, 512, 724, 1024, 1448, 2048, 4096),
)
"""Orders at which divergences are computed: dense where they matter, whole numbers from 32 on."""

LEAST_NOISE = 0.05
"""No smaller noise multiplier is looked for."""

_MOST_NOISE = 1e6
_CLOSED_FORM_FROM = 32  # a sum of a + 1 terms; below, the integral needs fewer
_ROUNDING, _EPS = 1e-14, 4e-16
"""Bounds on the rounding error of log A: absolute, and relative to its largest summand."""
_KEPT_BACK = 1e-6  # of a limit, so that another machine's rounding does not break it


@lru_cache(maxsize=4096)
def compute_divergences(run: Run, orders: tuple[float, ...] = ORDERS) -> Floats:
    """D_a of a whole run at each of `orders`, shape (A,); infinite without noise.

    Args:
        run: Sampling rate, noise multiplier and steps.
        orders: Each above 1; whole from 32 on.
    """
    import numpy as np
    from scipy.special import gammaln

    q, sigma = run.sampling_rate, run.noise_multiplier
    order_A = np.array(orders)
    if sigma == 0:
        return np.full(len(orders), math.inf)
    if q == 1:
        return np.asarray(order_A * run.steps / (2 * sigma**2))
    small_A = order_A < _CLOSED_FORM_FROM
    log_moment_A = np.empty(len(orders))
    log_moment_A[small_A] = _integrate_log_moment(q, sigma, order_A[small_A])
    log_moment_A[~small_A] = [_sum_log_moment(q, sigma, int(a)) for a in order_A[~small_A]]
    largest_A = np.maximum(np.abs(log_moment_A), gammaln(order_A + 1))
    log_moment_A = np.maximum(log_moment_A, 0) + _ROUNDING + _EPS * largest_A
    found: Floats = run.steps * log_moment_A / (order_A - 1)
    return found


def epsilon_at(order: float, divergence: float, delta: float) -> float:
    """Epsilon that a divergence at one order means.

    >>> round(epsilon_at(10, 0.5, 1e-5), 2)
    1.42
    """
    if math.isinf(divergence):
        return math.inf
    return float(max(0.0, divergence - _discount(order, delta)))


def divergence_at(order: float, epsilon: float, delta: float) -> float:
    """The divergence that an (epsilon, delta) allows at one order; negative if none."""
    return epsilon + _discount(order, delta)


def _discount(order: float, delta: float) -> float:
    return math.log(delta * order) / (order - 1) - math.log1p(-1 / order)


class RunCap(ABC):
    """Limit on each run of a search, on which the proof rests; fixed before the first run."""

    @abstractmethod
    def excess(self, run: Run, kept_back: float = 0.0) -> float:
        """Logarithm of what the run loses over what it may; at most 0 if it is let through.

        Args:
            run: Any.
            kept_back: Share of what it may lose that is not used.

        Raises:
            ArithmeticError: If nothing may be lost.
        """

    def admits(self, run: Run) -> bool:
        """True if the run stays within all limits."""
        return self.excess(run) <= 0

    def noise(self, steps: int, rate: float) -> float:
        """The least noise multiplier with which a run of this length is let through.

        Args:
            steps: T.
            rate: q.

        Raises:
            ArithmeticError: If no noise is enough.
        """
        return _cap_noise(self, steps, rate)


@lru_cache(maxsize=4096)
def _cap_noise(cap: RunCap, steps: int, rate: float) -> float:
    def excess(sigma: float) -> float:
        return cap.excess(Run(rate, sigma, steps), _KEPT_BACK)

    sigma = find_least_noise(excess)
    while excess(sigma) > 0:
        sigma *= 1 + _KEPT_BACK
    return sigma


@dataclass(frozen=True)
class Cap(RunCap):
    """The most that one run may lose at some orders.

    Attributes:
        orders: Each above 1.
        limits: Largest divergence at each.
    """

    orders: tuple[float, ...]
    limits: tuple[float, ...]

    @classmethod
    def over(cls, runs: Iterable[Run], margin: float = 0.0) -> Self:
        """The smallest that lets all `runs` through, widened by a share `margin`."""
        import numpy as np

        limits_A = (1 + margin) * np.max([compute_divergences(run) for run in runs], axis=0)
        return cls(ORDERS, tuple(limits_A.tolist()))

    def at(self, orders: tuple[float, ...]) -> Self:
        """Restrict the cap to fewer orders."""
        limit_of = dict(zip(self.orders, self.limits, strict=True))
        return type(self)(orders, tuple(limit_of[a] for a in orders))

    def excess(self, run: Run, kept_back: float = 0.0) -> float:
        """At the order where it is largest."""
        import numpy as np

        limits_A = np.array(self.limits) * (1 - kept_back)
        if not all(limits_A > 0):
            raise ArithmeticError("nothing may be lost")
        with np.errstate(divide="ignore", invalid="ignore"):
            # log(x / x) is 0 exactly: what a cap was taken from is let through.
            return float(np.max(np.log(compute_divergences(run, self.orders) / limits_A)))


def find_least_noise(excess: Callable[[float], float]) -> float:
    """The noise multiplier where the decreasing `excess` is zero, to one in a million.

    Raises:
        ArithmeticError: If none up to a million is enough.
    """
    from scipy.optimize import brentq

    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > _MOST_NOISE:
            raise ArithmeticError(f"noise multiplier {_MOST_NOISE:g} is not enough")
    low = high / 2
    while excess(low) <= 0:
        low /= 2
        if low < LEAST_NOISE:
            return LEAST_NOISE if excess(LEAST_NOISE) <= 0 else 2 * low
    root = brentq(lambda u: excess(math.exp(u)), math.log(low), math.log(high), xtol=1e-6)
    return math.exp(float(root))


def _integrate_log_moment(q: float, sigma: float, order_A: Floats) -> Floats:
    """Logarithm of A by the trapezoidal rule.

    The integrand is analytic within pi sigma of the real axis and falls off as a Gaussian, so the
    error falls as exp(-2 pi^2 sigma / width): below rounding at this width (Trefethen and
    Weideman 2014, theorem 5.1). Its two bumps lie at 0 and a / sigma.
    """
    import numpy as np
    from scipy.special import logsumexp

    if len(order_A) == 0:
        return order_A
    width = min(1.0, sigma) / 8
    z_Z = np.arange(-14.0, order_A.max() / sigma + 14, width)
    log_weight_Z = -(z_Z**2) / 2 - math.log(2 * math.pi) / 2 + math.log(width)
    log_ratio_Z = np.logaddexp(math.log1p(-q), math.log(q) + z_Z / sigma - 1 / (2 * sigma**2))
    return np.array([logsumexp(log_weight_Z + a * log_ratio_Z) for a in order_A])


def _sum_log_moment(q: float, sigma: float, order: int) -> float:
    """Logarithm of A for a whole order, in closed form (arXiv:1908.10530, section 3.3)."""
    import numpy as np
    from scipy.special import gammaln, logsumexp

    k = np.arange(order + 1)
    log_choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = log_choose + k * math.log(q) + (order - k) * math.log1p(-q)
    return float(logsumexp(terms + k * (k - 1) / (2 * sigma**2)))
