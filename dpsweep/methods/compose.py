"""A method put together by hand, from the parts the others are made of.

In a trial, for example:

    method:
      compose:
        query: {name: momentum, points: 3, decay: 0.9}        # DP-PMLF's
        filters: [{name: shelf, cut: 0.5, depth: 0.6}]        # FFTKF's
        noise: {name: banded, bands: 8}                       # DP-BandMF's
        base: adambc
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dpsweep.core.strict import Strict
from dpsweep.filters.base import Filter
from dpsweep.filters.lti import Ema, Momentum, Riccati
from dpsweep.filters.spectral import Shelf
from dpsweep.methods.base import Method
from dpsweep.methods.correlated import Bands, Buffers
from dpsweep.methods.disk import Gains
from dpsweep.methods.lowpass import Listed, LowPass
from dpsweep.methods.momentum import InnerMomentum
from dpsweep.privacy.correlated import INDEPENDENT, Banded, Buffered, Independent
from dpsweep.privacy.geometry import Spectral
from dpsweep.privacy.query import NEWEST_ITERATE, Query


class NewestIterateQuery(Strict):
    """One point, the newest iterate: DP-SGD's query."""

    name: Literal["here"] = "here"

    @property
    def query(self) -> Query:
        """The newest iterate alone."""
        return NEWEST_ITERATE


class LookAheadQuery(Gains):
    """DiSK's two points. Its prediction suits an average with the same gain behind it."""

    name: Literal["look_ahead"] = "look_ahead"


class MomentumQuery(InnerMomentum):
    """The momentum of InnerOuter and DP-PMLF, over the last iterates."""

    name: Literal["momentum"] = "momentum"


class EmaFilter(Strict):
    """Exponential moving average: DiSK's correction with a constant gain."""

    name: Literal["ema"] = "ema"

    gain: float = Field(gt=0, le=1)
    """Weight of the newest gradient; kappa in the DiSK paper."""

    def build(self) -> Filter:
        """The filter."""
        return Ema(self.gain)


class RiccatiFilter(Strict):
    """The average whose gain follows a Riccati equation: DiSK's with gain: riccati."""

    name: Literal["riccati"] = "riccati"

    process: float = Field(default=0.5, ge=1e-6, le=1e6)
    """Drift of the gradient in a step, in units of the noise's standard deviation."""

    hessian: float = Field(default=0.1, ge=0, lt=1)
    """Error of the prediction, in units of the noise's standard deviation."""

    def build(self) -> Filter:
        """The filter."""
        return Riccati(self.process, self.hessian)


class ShelfFilter(Strict):
    """FFTKF's mask over the spectrum of the released vector."""

    letters: ClassVar[dict[str, str]] = {"lambda": "cut", "rho": "depth"}

    name: Literal["shelf"] = "shelf"

    cut: float = Field(default=0.5, gt=0, lt=1)
    """Share of the frequencies kept whole."""

    depth: float = Field(default=0.5, ge=0, lt=1)
    """Share of the higher ones that is removed."""

    shape: Literal["step", "exponential", "butterworth"] = "step"
    """Shape of the mask's fall beyond the cut."""

    scope: Literal["model", "tensor"] = "model"
    """One signal: the whole model, or each tensor."""

    sharpness: float = Field(default=4.0, gt=0)
    """Steepness of the shapes exponential and butterworth."""

    def build(self) -> Filter:
        """The filter."""
        return Shelf(self.cut, self.depth, self.shape, self.scope, self.sharpness)


class LowPassFilter(LowPass):
    """DOPPLER's filter, in any of its four forms."""

    name: Literal["low_pass"] = "low_pass"


class MomentumFilter(Strict):
    """InnerOuter's heavy ball, unnormalised."""

    name: Literal["momentum"] = "momentum"

    decay: float = Field(default=0.9, ge=0, lt=1)
    """Share of the last momentum that is kept."""

    def build(self) -> Filter:
        """The filter."""
        return Momentum(self.decay)


class SpectralGeometry(Strict):
    """Spectral-DP's space, in which convolutions and circulant layers are clipped and noised."""

    name: Literal["spectral"] = "spectral"

    keep: float = Field(default=0.5, gt=0, le=1)
    """Share of the frequencies kept per axis of a convolution."""

    keep_circulant: float = Field(default=0.25, gt=0, le=1)
    """Share of the frequencies kept in the blocks of a CirculantLinear."""


class IndependentNoise(Strict):
    """Independent noise at each step: DP-SGD's."""

    name: Literal["independent"] = "independent"

    @property
    def noise(self) -> Independent:
        """The noise."""
        return INDEPENDENT


class BandedNoise(Bands):
    """DP-BandMF's noise, which takes back part of itself."""

    name: Literal["banded"] = "banded"

    @property
    def noise(self) -> Banded:
        """The noise."""
        return self.banded


class BufferedNoise(Buffers):
    """DP-FTRL's noise, without sampling."""

    name: Literal["buffered"] = "buffered"

    @property
    def noise(self) -> Buffered:
        """The noise."""
        return self.buffered


AnyQuery = Annotated[
    NewestIterateQuery | LookAheadQuery | MomentumQuery, Field(discriminator="name")
]
AnyFilter = Annotated[
    EmaFilter | RiccatiFilter | ShelfFilter | LowPassFilter | MomentumFilter,
    Field(discriminator="name"),
]


AnyNoise = Annotated[IndependentNoise | BandedNoise | BufferedNoise, Field(discriminator="name")]


def _is_independent(noise: AnyNoise) -> bool:
    """Leave the key out of a trial's identity: one that began before it was there goes on."""
    return isinstance(noise, IndependentNoise)


class Parts(Strict):
    """Query, noise, filters, base and geometry."""

    query: AnyQuery = NewestIterateQuery()
    """Evaluation points of a step: here, look_ahead or momentum."""

    filters: Annotated[tuple[AnyFilter, ...], Listed] = ()
    """Filters of the released gradient, in order: ema, riccati, shelf, low_pass, momentum."""

    noise: AnyNoise = Field(default=IndependentNoise(), exclude_if=_is_independent)
    """Noise over the steps: independent, banded (DP-BandMF's) or buffered (DP-FTRL's)."""

    base: Literal["sgd", "adam", "adamw", "adambc"] = "sgd"
    """The base optimizer; its own tunables stand under `optimizer`."""

    geometry: SpectralGeometry | None = None
    """The space in which per-example gradients are clipped; the parameters' own if missing."""


class Config(Strict):
    """A method of your own."""

    name: Literal["compose"] = "compose"

    compose: Parts = Parts()
    """Its parts."""


SPACE: dict[str, Any] = {}


def build(config: Config) -> Method:
    """The parts, put together; any combination is private.

    Whatever the query, one example enters once: its weighted sum of gradients at past iterates is
    clipped as a whole. Whatever the filters, they see releases alone. The noise decides how often
    an example is sampled and what the run is counted as (privacy/correlated.py).
    """
    parts = config.compose
    spectral = parts.geometry
    return Method(
        query=parts.query.query,
        filters=tuple(part.build() for part in parts.filters),
        geometry=Spectral(spectral.keep, spectral.keep_circulant) if spectral else None,
        noise=parts.noise.noise,
    )
