"""DP-BandMF: DP-SGD whose noise takes back part of itself."""

from typing import Any, Literal

from dpsweep.methods.base import Method
from dpsweep.methods.correlated import Bands


class Config(Bands):
    """Tunables of DP-BandMF."""

    name: Literal["bandmf"] = "bandmf"


SPACE: dict[str, Any] = {}


def build(config: Config) -> Method:
    """Banded noise in place of independent noise (Choquette-Choo et al., arXiv:2306.08153).

        x_t = (z_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0,    r_t = (sum + sigma C x_t) / B

    Private because C has b bands with |c| = 1, and an example can only be sampled at steps b
    apart, at random with probability b B / N: what it adds to C r lies in blocks that do not meet,
    each a Poisson-subsampled Gaussian mechanism of sensitivity C. So the run is counted as
    ceil(T / b) of them (docs/concepts/privacy.md has the proof).
    """
    return Method(noise=config.banded)
