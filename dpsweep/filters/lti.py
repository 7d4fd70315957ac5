"""Filters of first order: one remembered gradient, the same weights at every coordinate.

The released gradient at step t is signal plus white noise, r_t = s_t + w_t. Training moves
slowly, so s_t lives at low frequencies; w_t is spread evenly over all of them. A low-pass
filter therefore removes more noise than signal. Two numbers describe each filter here, and
tests/filters/test_lti.py measures both:

    frequency_response(w)   complex gain at angular frequency w (radians per step);
                            1 at w = 0, so a constant gradient is kept whole
    noise_gain              output variance per unit of white input variance

Both are those of the settled filter. `Momentum` alone does not keep a constant gradient as it
is, but adds it up. Filters of higher order are in filters/iir.py. Read filters/base.py first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, isfinite, log1p, sqrt
from typing import TYPE_CHECKING, ClassVar

from dpsweep.core.types import Released, Tensors
from dpsweep.filters.base import Public, State

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_DRIFT = 1e-24
"""Variance a step must add, in units of the noise's: below, the gain is 0 within rounding."""


@dataclass(frozen=True)
class Ema:
    """Exponential moving average, the simplest low-pass filter.

        m_t = (1 - gain) m_{t-1} + gain r_t,      m_0 = r_0

    Fed by the two-point query of methods/disk.py this is the correction step of a
    Kalman filter with constant gain (Zhang et al., DiSK, arXiv:2410.03883).

    Raises:
        ValueError: If gain is outside (0, 1] or NaN.

    >>> Ema(gain=0.5).noise_gain     # half gain keeps a third of the noise variance
    0.3333333333333333
    """

    over_time: ClassVar[bool] = True
    dc_gain = 1.0

    gain: float  # weight of the newest gradient, in (0, 1]. 1 leaves the gradient as it is

    def __post_init__(self) -> None:
        if not 0 < self.gain <= 1:  # asked this way round, NaN is refused too
            raise ValueError(
                f"Ema.gain must lie in (0, 1], got {self.gain}. "
                "1 trusts the new gradient alone; near 0 trusts only the past."
            )

    @property
    def noise_gain(self) -> float:
        """Sum of squared impulse response, gain / (2 - gain); reached as t grows."""
        return self.gain / (2 - self.gain)

    def frequency_response(self, w: Tensor) -> Tensor:
        """Complex gain at each angular frequency in `w`, shape (W,), radians per step."""
        return self.gain / (1 - (1 - self.gain) * (-1j * w).exp())

    def gain_at(self, step: int) -> float:
        """k_t, the same at every step."""
        return self.gain

    def init(self, params: Tensors) -> State:
        return None

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        return _average_with(self.gain, grad, state)


@dataclass(frozen=True)
class Riccati:
    """Kalman filter of a drifting gradient: its gain follows from two standard deviations.

        k_t = (p + v + h) / (p + v + 1),   p <- (1 - h) (p + v + h) / (p + v + 1),   p = 1 at first
        g~_t = (1 - k_t) g~_{t-1} + k_t r_t,                                         g~_{-1} = r_0

    p is the variance of the estimate's error, v = process^2, h = hessian^2, all in units of
    the variance of the noise in the released gradient, which is known. The recursion has the
    paper's limits, as it prints them (s = v + h):

        p_inf = (sqrt(s) sqrt(4 + v - 3 h) - s) / 2,    k_inf = (p_inf + s) / (p_inf + v + 1)

    and is a ratio of two linear functions of p, so that p_t has a closed form: with q = p_inf
    and R_t = (1 - k_inf)^(2 t) (1 - q) / (1 + q + s), it is (q + R_t (q + s)) / (1 - R_t). The gain
    of any step therefore costs the same and needs no memory, also where a run is resumed.

    Raises:
        ValueError: If either is outside its range or NaN, or if both are 0 or below 1e-12.

    Source: Zhang et al., DiSK, arXiv:2410.03883, section 3.3, appendix A.3, and Algorithm 2,
    whose first line sets p to the noise's variance: the first estimate is a noisy release.

    >>> filter_ = Riccati(process=0.5, hessian=0.0)
    >>> [round(filter_.gain_at(t), 3) for t in (0, 1, 2, 9)]
    [0.556, 0.446, 0.41, 0.39]
    """

    over_time: ClassVar[bool] = True
    dc_gain = 1.0

    # standard deviation of the gradient's own drift in a step, at least 0, in units of the noise's:
    # the paper's sigma_v / sigma_w
    process: float
    # standard deviation of the predicted change's error, in [0, 1), in units of the noise's: the
    # paper's sigma_H / sigma_w
    hessian: float

    def __post_init__(self) -> None:
        if not (self.process >= 0 and isfinite(self.process * self.process)):
            raise ValueError(
                f"Riccati.process must be a finite number, 0 or more, got {self.process}. It is "
                "the gradient's drift in a step, in units of the noise; 0.1 averages some 10 steps."
            )
        if not 0 <= self.hessian < 1:
            raise ValueError(
                f"Riccati.hessian must lie in [0, 1), got {self.hessian}. It is the error of the "
                "predicted change, in units of the noise, of which it is a part."
            )
        if not self._drift > _LEAST_DRIFT:
            raise ValueError(
                "Riccati.process and hessian must not both be 0 or next to it, got "
                f"{self.process} and {self.hessian}: the gain would be 0, and nothing would be "
                "learned after the first step. Raise one of them, say process to 0.1."
            )

    @property
    def settled_gain(self) -> float:
        """k_inf, in (0, 1]."""
        return self._gain(self._settled_error)

    @property
    def noise_gain(self) -> float:
        """Noise gain of the average with the settled gain, k_inf / (2 - k_inf)."""
        return Ema(self.settled_gain).noise_gain

    def frequency_response(self, w: Tensor) -> Tensor:
        """Gain of the settled filter at each angular frequency in `w`, shape (W,), rad per step."""
        return Ema(self.settled_gain).frequency_response(w)

    def gain_at(self, step: int) -> float:
        """k_t, in (0, 1]."""
        error, drift = self._settled_error, self._drift
        decay = exp(-2 * step * log1p((error + drift) / self._removable_share))  # (1 - k_inf)^(2 t)
        left = decay * (1 - error) / (1 + error + drift)
        return self._gain((error + left * (error + drift)) / (1 - left))

    def init(self, params: Tensors) -> State:
        return None

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        return _average_with(self.gain_at(public.step), grad, state)

    @property
    def _drift(self) -> float:
        """Variance s = v + h that one step adds."""
        return self.process * self.process + self.hessian * self.hessian

    @property
    def _removable_share(self) -> float:
        """1 - h, the part of the noise's variance that a correction can remove."""
        return 1 - self.hessian * self.hessian

    @property
    def _settled_error(self) -> float:
        """p_inf, the positive root of p^2 + s p - (1 - h) s, written without cancellation."""
        return 2 * self._removable_share / (1 + sqrt(1 + 4 * self._removable_share / self._drift))

    def _gain(self, error: float) -> float:
        """(p + s) / (p + v + 1), the denominator being p + s + (1 - h)."""
        return 1 / (1 + self._removable_share / (error + self._drift))


@dataclass(frozen=True)
class Momentum:
    """Heavy ball, unnormalised: what the outer momentum of InnerOuter is.

        m_t = beta m_{t-1} + r_t,      m_{-1} = 0

    The one filter here whose gain at zero frequency is not 1 but 1 / (1 - beta): a constant
    gradient comes out that much longer, and a learning rate must be that much smaller.

    Raises:
        ValueError: If beta is outside [0, 1) or NaN.

    Source: Xiao et al. 2023, InnerOuter.

    >>> round(Momentum(beta=0.9).noise_gain, 6)     # while a constant gradient grows tenfold
    5.263158
    """

    over_time: ClassVar[bool] = True

    beta: float  # share of the last momentum that is kept, in [0, 1). 0 is no filter

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(
                f"Momentum.beta must lie in [0, 1), got {self.beta}. "
                "0 is no filter; from 1 on the sum of past noise would never fade."
            )

    @property
    def noise_gain(self) -> float:
        """Sum of squared impulse response, 1 / (1 - beta^2); reached as t grows."""
        return 1 / (1 - self.beta**2)

    @property
    def dc_gain(self) -> float:
        """1 / (1 - beta)."""
        return 1 / (1 - self.beta)

    def frequency_response(self, w: Tensor) -> Tensor:
        """Complex gain at each angular frequency in `w`, shape (W,), radians per step."""
        return 1 / (1 - self.beta * (-1j * w).exp())

    def init(self, params: Tensors) -> State:
        return None

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        if state is None:
            return grad, grad
        m = Released({k: g.add(state[k], alpha=self.beta) for k, g in grad.items()})
        return m, m


def _average_with(gain: float, grad: Released, last: Released | None) -> tuple[Released, State]:
    """(1 - gain) last + gain grad, or grad where it is the first, as output and state."""
    if last is None:  # starting from zero would shrink the first steps
        return grad, grad
    mean = Released({k: last[k].lerp(g, gain) for k, g in grad.items()})
    return mean, mean
