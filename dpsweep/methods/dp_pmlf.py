"""DP-PMLF: per-sample momentum in front of the release, a low-pass filter behind it."""

from typing import Literal

from dpsweep.methods.base import Method
from dpsweep.methods.lowpass import LowPass
from dpsweep.methods.momentum import InnerMomentum


class Config(InnerMomentum):
    """Tunables of DP-PMLF."""

    name: Literal["dp_pmlf"] = "dp_pmlf"

    filter: LowPass = LowPass(published="a9_b1")
    """The low-pass filter: published, coefficients, design, or poles and zeros."""


SPACE = {
    "method.points": {"integer": [1, 4]},
    "method.decay": {"uniform": [0.1, 1.0]},
    "method.filter": {
        "choice": [
            {"published": "none"},
            {"published": "a6_b4"},
            {"published": "a6_b2_2"},
            {"published": "a9_b1"},
            {"published": "a9_b05_05"},
        ]
    },
}


def build(config: Config) -> Method:
    """Average each example over the last k iterates, then DOPPLER's filter (DP-PMLF paper).

        a_i = sum_j w_j grad f(x_{t-j}; xi_i),   w_j = beta^j / sum beta^j,   j = 0..k-1

    Private because the k points are past iterates and the weighted sum is clipped as one gradient.
    An example's momentum is recomputed from scratch at public points: none is carried from
    batch to batch, which would break amplification by sampling. Where the published weights run
    the other way or have no effect we follow the text: the newest point weighs most.
    """
    return Method(query=config.query, filters=(config.filter.build(),))
