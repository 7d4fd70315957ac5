"""DP-AdamBC: DP-SGD's release, Adam's step with the noise taken off its second moment."""

from typing import Literal

from dpsweep.core.strict import Strict
from dpsweep.methods.base import Method


class Config(Strict):
    """Its tunables are AdamBC's: `optimizer.beta1`, `optimizer.beta2`, `optimizer.floor`."""

    name: Literal["dp_adambc"] = "dp_adambc"


SPACE = {"optimizer.floor": {"log_uniform": [1.0e-8, 1.0e-4]}}


def build(config: Config) -> Method:
    """The gradient asked at x_t, released, then given to AdamBC (Tang et al., arXiv:2312.14334).

        theta -= lr m^ / sqrt(max(v^ - Phi, floor)),      Phi = noise_gain (sigma C / B)^2

    Private as DP-SGD is: the moments are functions of the released stream, and Phi of numbers
    fixed before training.
    """
    return Method()
