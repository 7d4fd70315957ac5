"""DP-SGD: clip each example's gradient, add noise, step."""

from typing import Any, Literal

from dpsweep.core.strict import Strict
from dpsweep.methods.base import Method


class Config(Strict):
    """DP-SGD has no tunables of its own."""

    name: Literal["dp_sgd"] = "dp_sgd"


SPACE: dict[str, Any] = {}


def build(config: Config) -> Method:
    """x_{t+1} = x_t - lr r_t with the gradient asked at x_t (Abadi et al., arXiv:1607.00133).

    Private because each step is one Poisson-subsampled Gaussian mechanism: the point x_t is a
    function of past releases, one example's gradient is clipped to C, and the divisor is B.
    """
    return Method()
