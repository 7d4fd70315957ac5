"""DiSK: a simplified Kalman filter over the gradient's path."""

from dataclasses import dataclass
from math import ceil, floor, isclose, log10
from typing import Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import InvalidKey
from dpsweep.core.strict import Strict
from dpsweep.filters.base import Gain
from dpsweep.filters.lti import Ema, Riccati
from dpsweep.methods.base import Method
from dpsweep.privacy.query import NEWEST_ITERATE, EvaluationPoint, JointQuery, Query

_MAX_WEIGHT = 1e3
"""Largest weight of a point, and longest look-ahead in steps. A difference of two points multiplies
float32's rounding by it, that of the other examples too: 2e-4 clip norms were seen at 1e4."""


def _round_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (floor(log10(value)) - 1)
    return ceil(value / unit) * unit


@dataclass(frozen=True)
class LookAhead(JointQuery):
    """Two points whose weighted sum carries the Kalman filter's prediction.

        {(1-c, x_t), (c, x_t + gamma d_{t-1})},     c = (1 - k_t) / (k_t gamma)

    One point only where the other's weight is zero.
    """

    gain: Gain  # k_t, a function of the step alone
    # look-ahead in units of the last step; None for (1 - k_t) / k_t, where c = 1
    gamma: float | None

    @property
    def memory(self) -> int:
        return 2

    def evaluation_points(self, step: int) -> tuple[EvaluationPoint, ...]:
        gain = self.gain.gain_at(step)
        ahead = (1 - gain) / gain if self.gamma is None else self.gamma
        if gain == 1:
            return (EvaluationPoint(1.0),)
        c = (1 - gain) / (gain * ahead)
        if isclose(c, 1):
            return (EvaluationPoint(1.0, ahead=ahead),)
        return (EvaluationPoint(1 - c), EvaluationPoint(c, ahead=ahead))


class Gains(Strict):
    """The tunables of the Kalman filter, shared with FFTKF."""

    kappa: float = Field(default=0.7, gt=0, le=1)
    """Kalman gain: weight of the new noisy gradient. 1 is plain DP-SGD. Print: 0.7, grid 0.5 to
    0.99. With gain: riccati it is not used."""

    gamma: float | Literal["one_point"] = 0.5
    """Look-ahead distance, in units of the last step x_t - x_{t-1}; not 0. Paper: 0.5, grid 0.2 to
    3; -1 is variance reduction; one_point is (1-kappa)/kappa, where one gradient is enough."""

    gain: Literal["constant", "riccati"] = "constant"
    """constant: kappa at every step. riccati: the filter's own gain, from process and hessian."""

    process: float = Field(default=0.5, ge=0, le=1e6)
    """sigma_v, how far the gradient moves in a step beyond the prediction, in units of the noise's
    standard deviation sigma C / B. Used with gain: riccati."""

    hessian: float = Field(default=0.1, ge=0, lt=1)
    """sigma_H, the error of the prediction, in units of the noise's standard deviation. Used with
    gain: riccati."""

    @model_validator(mode="after")
    def _check_look_ahead(self) -> Self:
        if self.gamma == 0:
            raise InvalidKey(
                "gamma",
                "must not be 0, got 0: the two points of the query would coincide and the "
                "weight (1 - kappa) / (kappa gamma) be infinite. The papers search 0.2 to 3; "
                "for no look-ahead use method dp_sgd, or kappa: 1",
            )
        try:
            _ = self.average
        except ValueError as e:
            raise InvalidKey("process", str(e).removesuffix(".")) from e
        gain = min(self.average.gain_at(0), self.average.gain_at(10**6))
        odds = (1 - gain) / gain
        ahead = odds if self.gamma == "one_point" else self.gamma
        most = _MAX_WEIGHT * min(1.0, abs(ahead))
        if odds > most:
            if odds <= _MAX_WEIGHT:
                key, words = "gamma", f"{_round_up(odds / _MAX_WEIGHT):g} or more, or -gamma"
            elif self.gain == "constant":
                key, words = "kappa", f"{_round_up(1 / (1 + most)):g} or more"
            else:
                key, words = "process", "a larger one"
            raise InvalidKey(
                key,
                f"gives the second point the weight c = (1 - kappa) / (kappa gamma) = "
                f"{odds / ahead:.3g} at gamma {ahead:.3g}; beyond {_MAX_WEIGHT:g} rounding is all "
                f"that is left of a difference. Give {key}: {words}",
            )
        return self

    @property
    def average(self) -> Gain:
        """The filter's correction: an average with this gain."""
        if self.gain == "riccati":
            return Riccati(process=self.process, hessian=self.hessian)
        return Ema(gain=self.kappa)

    @property
    def query(self) -> Query:
        """Evaluation points of the filter's prediction."""
        if self.gain == "constant" and self.kappa == 1:
            return NEWEST_ITERATE
        return LookAhead(self.average, None if self.gamma == "one_point" else self.gamma)


class Config(Gains):
    """Tunables of DiSK."""

    name: Literal["disk"] = "disk"


SPACE = {
    "method.kappa": {"uniform": [0.3, 1.0]},
    "method.gamma": {"choice": ["one_point", -1, 0.2, 0.5, 1, 2, 3]},
}


def build(config: Config) -> Method:
    """Ask at x_t and ahead of it, then average over time (Zhang et al., arXiv:2410.03883).

        a_i  = (1-c) grad f(x_t; xi_i) + c grad f(x_t + gamma d_{t-1}; xi_i)
        g~_t = (1 - k_t) g~_{t-1} + k_t r_t,      g~_{-1} = r_0,      c = (1 - k_t) / (k_t gamma)

    To first order a_i is g(x_t) + (1 - k)/k H (x_t - x_{t-1}), H the Hessian, so the average
    carries the Kalman filter's prediction as well as its correction. k_t is the constant kappa,
    or follows the scalar Riccati equation of the paper's section 3.3.

    Private because both points are functions of past releases, k_t is one of the step alone, and
    the pair's weighted sum is clipped as one gradient: one release a step, as in DP-SGD. Clipping
    each gradient first would let one example move the sum by (|1-c| + |c|) C.
    """
    return Method(query=config.query, filters=(config.average,))
