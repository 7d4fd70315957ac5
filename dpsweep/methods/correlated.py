"""The noise of a method, as a file says it: independent, banded or buffered."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import InvalidKey
from dpsweep.core.strict import Strict
from dpsweep.methods.lowpass import Listed
from dpsweep.privacy.correlated import Banded, Buffered


class Bands(Strict):
    """Tunables of banded noise."""

    bands: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """b: a step takes back part of the noise of the b - 1 steps before, and an example takes part
    at most every b-th step. 1 is independent noise. auto has the least predicted error."""

    coefficients: (
        Literal["optimal", "sqrt"] | Annotated[tuple[Annotated[float, Field(ge=0)], ...], Listed]
    ) = "optimal"
    """optimal for the least predicted error; sqrt for 1 / sqrt(1 - x); or b numbers that do not
    increase, of which only the ratios count: they are divided by their norm."""

    workload: Literal["prefix", "momentum"] = "prefix"
    """Sums that the error is about: prefix sums of the releases, as SGD makes them; or those of its
    heavy ball, with optimizer.momentum."""

    @model_validator(mode="after")
    def _check_coefficients(self) -> Self:
        given = self.coefficients
        if isinstance(given, str):
            return self
        if not given or given[0] == 0 or list(given) != sorted(given, reverse=True):
            raise InvalidKey(
                "coefficients",
                f"must begin above 0 and not increase, got {list(given)}: others let the noise "
                f"grow from step to step. Sort them, or write coefficients: optimal",
            )
        if self.bands not in ("auto", len(given)):
            raise InvalidKey(
                "coefficients",
                f"must be one for each of the {self.bands} bands, got {len(given)}. Give as many, "
                f"or delete bands",
            )
        return self

    @property
    def banded(self) -> Banded:
        """The noise."""
        given = self.coefficients
        bands = self.bands if isinstance(given, str) else len(given)
        return Banded(bands, given, self.workload)


class Buffers(Strict):
    """Tunables of DP-FTRL's noise."""

    buffers: int = Field(default=2, ge=1, le=3)
    """d: vectors of the weights' size that the noise remembers. More than 2 gain hardly more."""

    @property
    def buffered(self) -> Buffered:
        """The noise."""
        return Buffered(self.buffers)
