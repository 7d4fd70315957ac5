"""Linear time-invariant filters: the same weights at every step and coordinate.

The released gradient at step t is signal plus white noise, r_t = s_t + w_t. Training moves
slowly, so s_t lives at low frequencies; w_t is spread evenly over all of them. A low-pass
filter therefore removes more noise than signal. Two numbers describe each filter here, and
tests/filters/test_lti.py measures both:

    frequency_response(w)   complex gain at angular frequency w (radians per step);
                            1 at w = 0, so a constant gradient is kept whole
    noise_gain              output variance per unit of white input variance

Read filters/base.py first.
"""

from dataclasses import dataclass

import torch

from dpsweep.core.types import Released, Tensors
from dpsweep.filters.base import Public, State


@dataclass(frozen=True)
class Ema:
    """Exponential moving average, the simplest low-pass filter.

        m_t = (1 - gain) m_{t-1} + gain r_t,      m_0 = r_0

    Fed by the two-point query of methods/disk.py this is the correction step of a
    Kalman filter with constant gain (Zhang et al., DiSK, arXiv:2410.03883).

    Attributes:
        gain: Weight of the newest gradient, in (0, 1]. 1 leaves the gradient as it is.

    Raises:
        ValueError: If gain is outside (0, 1] or NaN.

    >>> Ema(gain=0.5).noise_gain     # half gain keeps a third of the noise variance
    0.3333333333333333
    """

    gain: float

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

    def frequency_response(self, w: torch.Tensor) -> torch.Tensor:
        """Complex gain at each angular frequency in `w`, shape (W,), radians per step."""
        return self.gain / (1 - (1 - self.gain) * torch.exp(-1j * w))

    def init(self, params: Tensors) -> State:
        return None

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        if state is None:  # m_0 = r_0: starting from zero would shrink the first steps
            return grad, grad
        mean = Released({k: torch.lerp(state[k], g, self.gain) for k, g in grad.items()})
        return mean, mean
