"""FFTKF: DiSK with the upper part of the released spectrum turned down first."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import InvalidKey
from dpsweep.filters.spectral import Shelf
from dpsweep.methods.base import Method
from dpsweep.methods.disk import Gains
from dpsweep.privacy.query import NEWEST_ITERATE, Query, SplitQuery


class Config(Gains):
    """Tunables of FFTKF."""

    letters: ClassVar[dict[str, str]] = {"lambda": "cut", "rho": "depth"}

    name: Literal["fftkf"] = "fftkf"

    cut: float = Field(default=0.5, gt=0, lt=1)
    """Share of the frequencies kept whole (lambda in the paper). Print: 0.5."""

    depth: float = Field(default=0.5, ge=0, lt=1)
    """Share of the higher ones that is removed (rho in the paper). Print: 0.5; best 0.6-0.7."""

    shape: Literal["step", "exponential", "butterworth"] = "step"
    """The shelf: step at the cut; exponential, as published, a notch above it; butterworth, a
    smooth roll-off."""

    sharpness: float = Field(default=4.0, gt=0)
    """Steepness of the shapes exponential (decay over the spectrum) and butterworth (order)."""

    scope: Literal["model", "tensor"] = "model"
    """One signal: the parameters of the whole model in a row, or each tensor."""

    predictor: Literal["joint", "split", "none"] = "joint"
    """joint: DiSK's combined query, at no privacy cost. split: the published finite difference,
    clipped and noised apart. none: as if the published algorithm ignored its prediction."""

    split_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the step's privacy cost that goes to the finite difference. The paper's sigma_fd is
    2 sigma / sqrt(split_share), in units of C / gamma. Used with predictor: split."""

    @model_validator(mode="after")
    def _split_has_one_weight(self) -> Self:
        if self.predictor == "split" and (self.gain == "riccati" or self.kappa == 1):
            given = "gain: riccati" if self.gain == "riccati" else "kappa: 1"
            raise InvalidKey(
                "predictor",
                f"split needs a constant gain below 1, got {given}: the difference's weight is "
                f"(1 - kappa) / (kappa gamma). Use predictor: joint, or kappa: 0.7",
            )
        return self

    @property
    def predicting_query(self) -> Query:
        """Query of the prediction."""
        if self.predictor == "none":
            return NEWEST_ITERATE
        if self.predictor == "joint":
            return self.query
        ahead = (1 - self.kappa) / self.kappa if self.gamma == "one_point" else self.gamma
        return SplitQuery(ahead, (1 - self.kappa) / (self.kappa * ahead), self.split_share)


SPACE = {
    "method.kappa": {"uniform": [0.3, 1.0]},
    "method.gamma": {"choice": ["one_point", -1, 0.2, 0.5, 1, 2, 3]},
    "method.depth": {"uniform": [0.0, 0.9]},
    "method.cut": {"uniform": [0.05, 0.95]},
}


def build(config: Config) -> Method:
    """DiSK's query, then a spectral shelf, then DiSK's average (Shin et al., FFTKF).

        r^_t = irfft(phi rfft(r_t)),     g~_t = (1 - kappa) g~_{t-1} + kappa r^_t

    Private as DiSK is: shelf and average see releases alone. Three differences from print, each
    for privacy or effect: the mask is laid over real frequencies, since the published one is, for
    a real vector at cut 1/2, a mere scaling; the prediction comes from DiSK's combined query,
    since the published prediction from raw gradients is not private; and the mask touches the
    release only, since masking the noise before it is added would void the calibration.

    With `predictor: split` the gradient and its change on the way ahead are clipped and noised
    apart, as in the paper's second version. Both are one release of sensitivity C (see
    `SplitQuery`); the difference's share of the cost is taken from the gradient's, never added
    to the budget.
    """
    shelf = Shelf(config.cut, config.depth, config.shape, config.scope, config.sharpness)
    return Method(query=config.predicting_query, filters=(shelf, config.average))
