"""Correlated noise as a filter of white noise, so that a chain's noise gain can be computed."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from dpsweep.core.types import Released, Tensors
from dpsweep.filters.base import Public, State
from dpsweep.privacy.correlated import Correlation


@dataclass(frozen=True)
class Coloured:
    """The filter C^-1, which turns white noise z into correlated noise x.

    It is never applied to a release: the noise is made before it. AdamBC subtracts the variance
    of the filtered noise, and needs the gain of C^-1 and the method's filters together.
    """

    over_time: ClassVar[bool] = True
    dc_gain = 1.0

    correlation: Correlation  # of the run

    @property
    def noise_gain(self) -> float:
        """Sum of the squared impulse response, at the end of the run."""
        return float(self.correlation.noise_gains(self.correlation.steps)[-1])

    def frequency_response(self, w: torch.Tensor) -> torch.Tensor:
        """Complex gain at each angular frequency in `w`, shape (W,), radians per step."""
        delay = (-1j * w).exp()
        first, *others = self.correlation.coefficients
        if decays := self.correlation.decays:
            strategy = torch.ones_like(delay)
            for scale, decay in zip(others, decays, strict=True):
                strategy = strategy + scale * delay / (1 - decay * delay)
            return 1 / (first * strategy)
        strategy = torch.zeros_like(delay)
        for coefficient in reversed(self.correlation.coefficients):
            strategy = strategy * delay + coefficient
        return 1 / strategy

    def init(self, params: Tensors) -> State:
        raise NotImplementedError("describes noise; a release never passes it")

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        raise NotImplementedError("describes noise; a release never passes it")
