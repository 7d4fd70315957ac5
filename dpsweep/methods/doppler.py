"""DOPPLER: DP-SGD behind a low-pass filter of any order."""

from typing import Literal

from dpsweep.core.strict import Strict
from dpsweep.methods.base import Method
from dpsweep.methods.lowpass import LowPass


class Config(Strict):
    """Tunables of DOPPLER."""

    name: Literal["doppler"] = "doppler"

    filter: LowPass = LowPass(published="a9_b1")
    """The low-pass filter: published, coefficients, design, or poles and zeros."""


SPACE = {
    "method.filter": {
        "choice": [
            {"published": "a6_b4"},
            {"published": "a6_b2_2"},
            {"published": "a9_b1"},
            {"published": "a9_b05_05"},
            {"published": "a9_b15_m05"},
            {"published": "a7_2_b05_05"},
        ]
    }
}


def build(config: Config) -> Method:
    """Low-pass the released gradients over time (Zhang et al., arXiv:2408.13460).

        m_t = - sum_r a_r m_{t-r} + sum_r b_r r_{t-r},      g~_t = m_t / c_t

    c_t is the filter's response to ones, which undoes the zeros it starts from.

    Private as DP-SGD is: the release is DP-SGD's own, and the filter, whose coefficients are
    fixed numbers, sees releases alone.
    """
    return Method(filters=(config.filter.build(),))
