"""InnerOuter: momentum inside each example's gradient, and momentum over the releases."""

from typing import ClassVar, Literal

from pydantic import Field

from dpsweep.filters.lti import Momentum
from dpsweep.methods.base import Method
from dpsweep.methods.momentum import InnerMomentum


class Config(InnerMomentum):
    """Tunables of InnerOuter."""

    letters: ClassVar[dict[str, str]] = {**InnerMomentum.letters, "beta_o": "outer_decay"}

    name: Literal["innerouter"] = "innerouter"

    outer_decay: float = Field(default=0.9, ge=0, lt=1)
    """beta_o of the heavy ball over releases; it multiplies the step by 1 / (1 - beta_o)."""


SPACE = {
    "method.points": {"integer": [1, 4]},
    "method.decay": {"uniform": [0.1, 1.0]},
    "method.outer_decay": {"uniform": [0.0, 0.95]},
}


def build(config: Config) -> Method:
    """Average each example over the last k iterates, then a heavy ball (Xiao et al. 2023).

        a_i = sum_j w_j grad f(x_{t-j}; xi_i),   w_j = beta^j / sum beta^j
        m_t = beta_o m_{t-1} + r_t               unnormalised

    Private because the k points are past iterates, hence functions of past releases, and the
    weighted sum is clipped as one gradient; clipping each point's gradient and adding them up
    would have sensitivity k C. The heavy ball sees releases alone.
    """
    return Method(query=config.query, filters=(Momentum(config.outer_decay),))
