"""Block Spectral-DP: Spectral-DP with dense layers made of circulant blocks."""

from typing import Literal

from pydantic import Field

from dpsweep.core.strict import Strict
from dpsweep.methods.base import Method
from dpsweep.privacy.geometry import Spectral


class Config(Strict):
    """Tunables of Block Spectral-DP."""

    name: Literal["block_spectral_dp"] = "block_spectral_dp"

    keep: float = Field(default=0.5, gt=0, le=1)
    """Share of the frequencies kept, per axis, in every convolution. Print: 0.5."""

    keep_circulant: float = Field(default=0.25, gt=0, le=1)
    """Share of the frequencies kept in the blocks of every CirculantLinear, at least one of the
    block's own number. Print: 0.25."""


SPACE = {"method.keep": {"uniform": [0.3, 1.0]}, "method.keep_circulant": {"uniform": [0.25, 1.0]}}


def build(config: Config) -> Method:
    """Spectral-DP for convolutions, and for CirculantLinear with a share of its own.

        G_ij = circular correlation of output gradient and input, in R^d;   low-passed in 1-D

    (Feng et al. 2023, section on block circulant layers.) A circulant block of size d has d
    weights in place of d^2, so fewer coordinates are noised.

    Private as Spectral-DP is: the generators' whole gradient is clipped, W has orthonormal rows,
    and what is low-passed afterwards is the release.
    """
    return Method(geometry=Spectral(config.keep, config.keep_circulant))
