"""DiSK: a simplified Kalman filter over the gradient's path."""

from math import isclose
from typing import Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import Misfit
from dpsweep.core.strict import Strict
from dpsweep.filters.lti import Ema
from dpsweep.methods.base import Method
from dpsweep.privacy.query import HERE, Ask, Query


class Gains(Strict):
    """The two tunables of the Kalman filter, shared with FFTKF."""

    kappa: float = Field(default=0.7, gt=0, le=1)
    """Kalman gain: weight of the new noisy gradient. 1 is plain DP-SGD. Print: 0.7."""

    gamma: float = Field(default=0.5)
    """Look-ahead distance, in units of the last step x_t - x_{t-1}. Print: 0.5; not 0."""

    @model_validator(mode="after")
    def _gamma_divides(self) -> Self:
        if self.gamma == 0:
            raise Misfit(
                "gamma",
                "must not be 0, got 0: the two points of the query would coincide and the "
                "weight (1 - kappa) / (kappa gamma) be infinite. The papers search 0.2 to 3; "
                "for no look-ahead use method dp_sgd, or kappa: 1",
            )
        return self

    @property
    def query(self) -> Query:
        """{(1-c, x_t), (c, x_t + gamma d_{t-1})} with c = (1-kappa)/(kappa gamma).

        One point where the other's weight is zero.
        """
        c = (1 - self.kappa) / (self.kappa * self.gamma)
        if c == 0:
            return HERE
        if isclose(c, 1):
            return (Ask(weight=1.0, ahead=self.gamma),)
        return (Ask(weight=1 - c), Ask(weight=c, ahead=self.gamma))


class Config(Gains):
    """Tunables of DiSK."""

    name: Literal["disk"] = "disk"


def build(config: Config) -> Method:
    """Ask at x_t and ahead of it, then average over time (Zhang et al., arXiv:2410.03883).

        g~_t = (1 - kappa) g~_{t-1} + kappa r_t,      g~_{-1} = r_0

    To first order the weighted pair is g(x_t) + (1 - kappa)/kappa * H (x_t - x_{t-1}), H the
    Hessian, so the average carries the Kalman filter's prediction as well as its correction.

    Private because both points are functions of past releases and the pair's weighted sum is
    clipped as one answer: one release a step, as in DP-SGD. The average sees releases alone.
    """
    return Method(query=config.query, filters=(Ema(gain=config.kappa),))
