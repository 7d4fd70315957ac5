"""DP-Adam: DP-SGD's release, Adam's step."""

from typing import Any, Literal

from dpsweep.core.strict import Strict
from dpsweep.methods.base import Method


class Config(Strict):
    """DP-Adam's tunables are Adam's: `optimizer.beta1`, `optimizer.beta2`, `optimizer.eps`."""

    name: Literal["dp_adam"] = "dp_adam"


SPACE: dict[str, Any] = {}


def build(config: Config) -> Method:
    """The gradient asked at x_t, released, then given to Adam.

    Private as DP-SGD is: both of Adam's moments are functions of the released stream.
    """
    return Method()
