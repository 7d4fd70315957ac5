"""FFTKF: DiSK with the upper half of the released spectrum turned down first."""

from typing import ClassVar, Literal

from pydantic import Field

from dpsweep.filters.lti import Ema
from dpsweep.filters.spectral import Shelf
from dpsweep.methods.base import Method
from dpsweep.methods.disk import Gains


class Config(Gains):
    """Tunables of FFTKF."""

    letters: ClassVar[dict[str, str]] = {"lambda": "cut", "rho": "depth"}

    name: Literal["fftkf"] = "fftkf"

    cut: float = Field(default=0.5, gt=0, lt=1)
    """Share of the frequencies kept whole (lambda in the paper). Print: 0.5."""

    depth: float = Field(default=0.5, ge=0, lt=1)
    """How much of the higher ones is taken away (rho in the paper). Print: 0.5; best 0.6-0.7."""


def build(config: Config) -> Method:
    """DiSK's query, then a spectral shelf, then DiSK's average (Shin et al., FFTKF).

        r^_t = irfft(phi rfft(r_t)),     g~_t = (1 - kappa) g~_{t-1} + kappa r^_t

    Private as DiSK is: shelf and average see releases alone. Three differences from print, each
    for privacy or effect: the mask is laid over real frequencies, since the printed one is, for
    a real vector at cut 1/2, a mere scaling; the prediction comes from DiSK's combined query,
    since the printed prediction from raw gradients is not private; and the mask touches the
    release only, since masking the noise before it is added would void the calibration.
    """
    return Method(
        query=config.query,
        filters=(Shelf(cut=config.cut, depth=config.depth), Ema(gain=config.kappa)),
    )
