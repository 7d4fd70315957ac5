"""DP-FTRL: correlated noise with a few buffers, and no sampling."""

from typing import Any, Literal

from dpsweep.methods.base import Method
from dpsweep.methods.correlated import Buffers


class Config(Buffers):
    """Tunables of DP-FTRL."""

    name: Literal["dp_ftrl"] = "dp_ftrl"


SPACE: dict[str, Any] = {}


def build(config: Config) -> Method:
    """Noise from decaying sums of past noise (BLT; McMahan et al. 2024, arXiv:2408.08868).

        c_0 x_t = z_t - c_0 sum_j s_j u_{j,t},       u_{j,t+1} = d_j u_{j,t} + x_t

    Private because an example belongs to one of floor(N / B) groups, drawn from the secret, that
    take turns: it takes part at most once a cycle, and the worst that all its parts together move
    C r is C times the square root of their number. Nothing is gained by sampling, which is why
    DP-BandMF does better where a trainer may sample; the papers compare with it.
    """
    return Method(noise=config.buffered)
