"""Spectral-DP: clip and noise convolutions as whole correlations, keep the low frequencies."""

from typing import Literal

from pydantic import Field

from dpsweep.core.strict import Strict
from dpsweep.methods.base import Method
from dpsweep.privacy.geometry import Spectral


class Config(Strict):
    """Tunables of Spectral-DP."""

    name: Literal["spectral_dp"] = "spectral_dp"

    keep: float = Field(default=0.5, gt=0, le=1)
    """Share of the frequencies kept, per axis, in every convolution and circulant layer; 1 is
    DP-SGD's noise. Print: 0.5."""


SPACE = {"method.keep": {"uniform": [0.3, 1.0]}}


def build(config: Config) -> Method:
    """Release each layer's gradient through the low frequencies of its correlation.

        u_i = R_i, all lags of the layer's correlation;   r = (1/B) crop M (sum clip(R_i) + noise)

    of which the kernel's gradient is a crop (Feng et al. 2023, Spectral-DP). The noise left per
    kernel entry has keep^2 of the variance, since a kernel sees few of the lags.

    Private because M and crop are fixed maps of the release. What is computed is the same law in
    whitened coordinates W R, W with orthonormal rows (privacy/spectral.py): |W R_i| <= |R_i| <= C,
    and the noise there is isotropic. R is clipped whole, not its crop. Layers are clipped apart
    unless `privacy.clipping` says otherwise. The paper's low-pass is one-sided, this one two-sided:
    one-sided masks of a real signal's transform pass frequencies whose mirror, un-noised, is the
    same.
    """
    return Method(geometry=Spectral(config.keep, config.keep))
