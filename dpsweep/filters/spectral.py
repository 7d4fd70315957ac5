"""Filters across coordinates: they reshape one released gradient, with no memory of the last.

The gradient of all parameters, laid out as one vector of length P, has a spectrum over the
floor(P/2) + 1 real frequencies of its discrete Fourier transform. White noise fills them
evenly. Masking the released vector is post-processing; masking the noise before it is
added would void the calibration, and nothing here can reach it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import expm1, floor
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from dpsweep.core.errors import suggest_names
from dpsweep.core.types import Released, Tensors
from dpsweep.filters.base import Public, State

if TYPE_CHECKING:
    import torch

Shape = Literal["step", "exponential", "butterworth"]
Scope = Literal["model", "tensor"]


@dataclass(frozen=True)
class Shelf:
    """Turns the upper frequencies down (the FFT mask of FFTKF).

        r^ = irfft(phi * rfft(r)),   f = k / num_bins in [0, 1),   num_bins = floor(P/2) + 1

        step          phi = 1 for k < floor(cut num_bins), 1 - depth from there on
        exponential   phi = 1 for f < cut, 1 - depth exp(-sharpness (f - cut)) from there on
        butterworth   phi = (1 - depth) + depth / sqrt(1 + (f / cut)^(2 sharpness))

    The paper masks the bins 0..P-1 of the full transform. Of a real vector the bins k and
    P - k are one frequency, so its mask at cut 1/2 is, once the real part is taken, a mere
    scaling by 1 - depth/2. This one masks real frequencies, each bin with its mirror.

    exponential is the shape of the first published version: a notch at the cut, through which
    the highest frequencies pass again. Print counts its decay in bins; a share of the spectrum
    means the same for every model. butterworth is the smooth roll-off, half down at the cut in
    the sense of power where depth is 1, and near step where sharpness is large.

    Raises:
        ValueError: If one is outside its range or NaN.

    Source: Shin et al., FFTKF, eq. 22 and Algorithm 1, line 5; exponential: its first version.

    >>> Shelf(cut=0.5, depth=0.5).noise_gain
    0.625
    >>> round(Shelf(cut=0.5, depth=0.5, shape="exponential").noise_gain, 3)
    0.815
    """

    over_time: ClassVar[bool] = False
    dc_gain = 1.0

    cut: float  # share of the frequencies kept whole, in (0, 1). The paper's lambda
    depth: float  # how much of the rest is taken away, in [0, 1). The paper's rho; 0 is no filter
    shape: Shape = "step"  # how the mask goes down
    # what P counts: all parameters as one vector (model) or each tensor by itself (tensor). There
    # step always lets frequency 0 pass: a tensor of a few elements has no other, and would merely
    # be scaled
    scope: Scope = "model"
    # above 0; for exponential the decay over the whole spectrum (the paper's alpha times num_bins),
    # for butterworth the order. step does not use it
    sharpness: float = 4.0

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
        if not 0 < self.sharpness < float("inf"):
            raise ValueError(
                f"Shelf.sharpness must be a finite number above 0, got {self.sharpness}. "
                "Large, exponential is a narrow notch and butterworth a step."
            )
        for key, value, known in (
            ("shape", self.shape, get_args(Shape)),
            ("scope", self.scope, get_args(Scope)),
        ):
            if value not in known:
                raise ValueError(
                    f"Shelf.{key}: unknown {key} {value!r}.{suggest_names(value, known)}"
                )

    @property
    def noise_gain(self) -> float:
        """Mean of phi squared over the spectrum, for tensors of many coordinates.

        step: cut + (1 - cut)(1 - depth)^2, up to one bin in P/2. exponential: in closed form.
        butterworth: over half a million bins, to 1e-6.
        """
        rest = 1 - self.cut
        match self.shape:
            case "step":
                return self.cut + rest * (1 - self.depth) ** 2
            case "exponential":
                once = -expm1(-self.sharpness * rest) / self.sharpness
                twice = -expm1(-2 * self.sharpness * rest) / (2 * self.sharpness)
                return 1 - 2 * self.depth * once + self.depth**2 * twice
            case "butterworth":
                return float(self.frequency_response(2**20).square().mean())

    def frequency_response(
        self, num_params: int, device: torch.device | None = None
    ) -> torch.Tensor:
        """Phi at each of the floor(P/2) + 1 real frequencies of `num_params` coordinates."""
        import torch

        bins = num_params // 2 + 1
        f = torch.arange(bins, dtype=torch.float64, device=device) / bins
        match self.shape:
            case "step":
                phi = torch.ones_like(f)
                whole = 1 if self.scope == "tensor" else 0
                phi[max(floor(self.cut * bins), whole) :] = 1 - self.depth
                return phi
            case "exponential":
                notch = 1 - self.depth * torch.exp(-self.sharpness * (f - self.cut))
                return torch.where(f < self.cut, 1.0, notch)
            case "butterworth":
                kept = (1 + (f / self.cut) ** (2 * self.sharpness)).rsqrt()
                return (1 - self.depth) + self.depth * kept

    def init(self, params: Tensors) -> State:
        return None

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        import torch

        if self.scope == "tensor":
            return Released(
                {k: self._apply_mask(g.flatten()).view_as(g) for k, g in grad.items()}
            ), None
        kept_P = self._apply_mask(torch.cat([g.flatten() for g in grad.values()]))
        parts = torch.split(kept_P, [g.numel() for g in grad.values()])
        pairs = zip(grad.items(), parts, strict=True)
        return Released({k: part.view_as(g) for (k, g), part in pairs}), None

    def _apply_mask(self, flat_P: torch.Tensor) -> torch.Tensor:
        import torch

        phi = self.frequency_response(len(flat_P), flat_P.device).to(flat_P)
        masked: torch.Tensor = torch.fft.irfft(phi * torch.fft.rfft(flat_P), n=len(flat_P))
        return masked
