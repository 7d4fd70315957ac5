"""Filters across coordinates: they reshape one released gradient, with no memory of the last.

The gradient of all parameters, laid out as one vector of length P, has a spectrum over the
floor(P/2) + 1 real frequencies of its discrete Fourier transform. White noise fills them
evenly. Masking the released vector is post-processing; masking the noise before it is
added would void the calibration, and nothing here can reach it.
"""

from dataclasses import dataclass
from math import floor

import torch

from dpsweep.core.types import Released, Tensors
from dpsweep.filters.base import Public, State


@dataclass(frozen=True)
class Shelf:
    """Turns the upper frequencies down by a fixed share (the FFT mask of FFTKF).

        r^ = irfft(phi * rfft(r)),   phi_k = 1 for k < k0, 1 - depth for k >= k0,
        k0 = floor(cut * (floor(P/2) + 1))

    The paper masks the bins 0..P-1 of the full transform. Of a real vector the bins k and
    P - k are one frequency, so its mask at cut 1/2 is, once the real part is taken, a mere
    scaling by 1 - depth/2. This one masks real frequencies, each bin with its mirror.

    Attributes:
        cut: Share of the frequencies kept whole, in (0, 1). The paper's lambda.
        depth: How much of the rest is taken away, in [0, 1). The paper's rho; 0 is no filter.

    Raises:
        ValueError: If either is outside its range or NaN.

    Source: Shin et al., FFTKF, eq. 22 and Algorithm 1, line 5.

    >>> Shelf(cut=0.5, depth=0.5).noise_gain
    0.625
    """

    cut: float
    depth: float

    def __post_init__(self) -> None:
        if not 0 < self.cut < 1:
            raise ValueError(
                f"Shelf.cut must lie in (0, 1), got {self.cut}. "
                "It is the share of frequencies kept whole."
            )
        if not 0 <= self.depth < 1:
            raise ValueError(
                f"Shelf.depth must lie in [0, 1), got {self.depth}. "
                "0 takes nothing away; near 1 silences the upper frequencies."
            )

    @property
    def noise_gain(self) -> float:
        """Mean of phi squared, cut + (1 - cut)(1 - depth)^2, up to one bin in P/2."""
        return self.cut + (1 - self.cut) * (1 - self.depth) ** 2

    def frequency_response(self, num_params: int) -> torch.Tensor:
        """Phi at each of the floor(P/2) + 1 real frequencies of `num_params` coordinates."""
        bins = num_params // 2 + 1
        phi = torch.ones(bins, dtype=torch.float64)
        phi[floor(self.cut * bins) :] = 1 - self.depth
        return phi

    def init(self, params: Tensors) -> State:
        return None

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        flat_P = torch.cat([g.flatten() for g in grad.values()])
        phi = self.frequency_response(len(flat_P)).to(flat_P)
        kept_P = torch.fft.irfft(phi * torch.fft.rfft(flat_P), n=len(flat_P))
        parts = kept_P.split([g.numel() for g in grad.values()])
        pairs = zip(grad.items(), parts, strict=True)
        return Released({k: part.view_as(g) for (k, g), part in pairs}), None
