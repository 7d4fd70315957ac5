"""The low-pass filter of DOPPLER and DP-PMLF, as a sweep file says it: in one of four forms."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import InvalidKey
from dpsweep.core.strict import Strict
from dpsweep.filters.design import COEFFICIENT_SETS, Coefficients, butterworth, chebyshev, pole_zero
from dpsweep.filters.iir import Iir, Row

_DEFAULT_RIPPLE_DB = 1.0

Listed = Field(strict=False)
"""Lets a YAML list be a tuple; its entries are as strict as ever."""


class CoefficientsConfig(Strict):
    """The two rows of numbers themselves."""

    a: Annotated[Row, Listed] = ()
    """Feedback a_1..a_na; m_t = 0.9 m_{t-1} + ... is [-0.9]. Empty: no recursion."""

    b: Annotated[Row, Listed]
    """Input weights b_0..b_nb, with sum b = 1 + sum a."""


class DesignConfig(Strict):
    """A textbook design."""

    family: Literal["butterworth", "chebyshev"] = "butterworth"
    """butterworth is flat below the cutoff; chebyshev ripples there and is steeper above."""

    order: int = Field(ge=1, le=8)
    """Each one more makes the roll-off steeper, and remembers two gradients more."""

    cutoff: float = Field(gt=0, lt=1)
    """Share of the Nyquist frequency; 0.1 keeps what takes over 20 steps to swing once."""

    ripple_db: float | None = Field(default=None, gt=0, le=12)
    """Height of chebyshev's ripples in decibels; 1 if missing. butterworth has none."""

    @model_validator(mode="after")
    def _only_chebyshev_ripples(self) -> Self:
        if self.family == "butterworth" and self.ripple_db is not None:
            raise InvalidKey(
                "ripple_db",
                f"is {self.ripple_db}, but a butterworth filter has no ripples. Delete it, or "
                "set family: chebyshev",
            )
        return self

    @property
    def coefficients(self) -> Coefficients:
        """(a, b)."""
        if self.family == "butterworth":
            return butterworth(self.order, self.cutoff)
        return chebyshev(self.order, self.cutoff, self.ripple_db or _DEFAULT_RIPPLE_DB)


class Root(Strict):
    """A pole or a zero; one at an angle between 0 and pi stands for a conjugate pair."""

    radius: float = Field(ge=0)
    """Distance from 0. A pole's must be below 1; nearer to 1, the past fades more slowly."""

    angle: float = Field(default=0.0, ge=0, le=3.1416)
    """Radians, in [0, pi]: frequency it acts on. Within 1e-5 of either end it is that end."""


class LowPass(Strict):
    """A low-pass filter over steps, given in exactly one form; it is built when it is read."""

    published: (
        Literal[
            "none",
            "a9_b1",
            "a9_b15_m05",
            "a9_b05_05",
            "a6_b4",
            "a6_b2_2",
            "a6_b5_m1",
            "a7_2_b05_05",
        ]
        | None
    ) = None
    """A set of coefficients from the papers: a9_b1 has a = [-0.9], b = [0.1]; m is minus."""

    coefficients: CoefficientsConfig | None = None
    """The two rows of numbers themselves."""

    design: DesignConfig | None = None
    """A textbook design: family, order, cutoff."""

    poles: Annotated[tuple[Root, ...], Listed] | None = None
    """Radius and angle of each pole; with zeros, scaled to keep a constant gradient whole."""

    zeros: Annotated[tuple[Root, ...], Listed] | None = None
    """Radius and angle of each zero, beside poles. Radius 1 silences that frequency."""

    @model_validator(mode="after")
    def _has_one_valid_form(self) -> Self:
        given = [key for key in _FORMS if getattr(self, key) is not None]
        if len(given) > 1:
            raise InvalidKey(
                given[1], f"is a second form of the filter, beside {given[0]}. Keep one of the two"
            )
        if not given:
            lone = "zeros are given without poles" if self.zeros else "nothing is given"
            forms = "; or ".join(_FORMS.values())
            raise ValueError(f"needs a filter in one of four forms, but {lone}. Write {forms}")
        if self.zeros is not None and self.poles is None:
            raise InvalidKey("zeros", f"belong to poles, not to {given[0]}. Delete one of the two")
        self.build()
        return self

    def build(self) -> Iir:
        """The filter.

        Raises:
            InvalidKey: If it is none that one may train with, naming the key to change.
        """
        try:
            return Iir(*self._coefficients())
        except InvalidKey as e:
            raise InvalidKey(self._key_of(e.key), str(e)) from e

    def _coefficients(self) -> Coefficients:
        if self.published is not None:
            return COEFFICIENT_SETS[self.published]
        if self.coefficients is not None:
            return self.coefficients.a, self.coefficients.b
        if self.design is not None:
            return self.design.coefficients
        return pole_zero(_to_pairs(self.poles), _to_pairs(self.zeros))

    def _key_of(self, key: str) -> str:
        """The key of the sweep file that `key`, of the filter or its design, came from."""
        if self.coefficients is not None:
            return f"coefficients.{key}"
        if self.design is not None:
            return "design" if key in ("a", "b") else f"design.{key}"
        return "zeros" if key == "zeros" or (key == "b" and self.zeros) else "poles"


_FORMS = {
    "published": "published: a9_b1",
    "coefficients": "coefficients: {a: [-0.9], b: [0.1]}",
    "design": "design: {family: butterworth, order: 2, cutoff: 0.1}",
    "poles": "poles: [{radius: 0.9, angle: 0.0}], zeros: [{radius: 1.0, angle: 3.14159}]",
}
"""An example of each form, by its key."""


def _to_pairs(roots: tuple[Root, ...] | None) -> list[tuple[float, float]]:
    return [(root.radius, root.angle) for root in roots or ()]
