"""The styles of clipping, as a file says them: `clipping: flat`, or a mapping with a name."""

from typing import Annotated, Literal

from pydantic import Field

from dpsweep.core.errors import InvalidKey
from dpsweep.core.strict import Strict
from dpsweep.privacy.clip import Automatic, Clip, Flat, PerLayer, Quantile

_LEAST_SHARE = 1e-9
"""Of the count where nothing is noised; it only has to be readable."""


class FlatClipping(Strict):
    """Scales down what is longer than clip_norm (Abadi et al. 2016)."""

    name: Literal["flat"] = "flat"

    def build(self, bound: float, noise_multiplier: float, batch_size: int) -> Clip:
        """The style at norm `bound`."""
        return Flat(bound)


class AutomaticClipping(Strict):
    """Scales everything to nearly clip_norm (Bu et al. 2023)."""

    name: Literal["automatic"] = "automatic"

    stability: float = Field(default=0.01, ge=1e-6)
    """s in C / (|u| + s), in gradient units; smaller ones meet the rounding of tiny norms."""

    def build(self, bound: float, noise_multiplier: float, batch_size: int) -> Clip:
        """The style at norm `bound`."""
        return Automatic(bound, self.stability)


class PerLayerClipping(Strict):
    """Scales down each layer's part of a gradient by itself; the whole stays within clip_norm."""

    name: Literal["per_layer"] = "per_layer"

    bounds: dict[str, Annotated[float, Field(gt=0, le=1)]] | None = None
    """Layer -> its bound as a share of clip_norm, the squares summing to 1. Equal if missing."""

    def build(self, bound: float, noise_multiplier: float, batch_size: int) -> Clip:
        """The style at norm `bound`."""
        return PerLayer(bound, self.bounds)


class AdaptiveClipping(Strict):
    """Flat clipping at a quantile of the per-example gradient norms (Andrew et al. 2021).

    It starts at clip_norm. How many gradients lie inside is released with noise of its own, paid
    for out of the same epsilon: the gradient's noise grows by 1 / sqrt(1 - share).
    """

    name: Literal["adaptive"] = "adaptive"

    quantile: float = Field(default=0.5, ge=0, le=1)
    """Share of the examples whose gradients shall not be scaled down. Print: 0.5."""

    rate: float = Field(default=0.2, gt=0, le=10)
    """Speed of the norm: it changes by at most a factor exp(rate) a step. Print: 0.2."""

    count_noise: float | None = Field(default=None, gt=0)
    """Standard deviation of the noise on the count, in examples; batch_size / 20 if missing, as in
    print. Must exceed half the noise multiplier."""

    def build(self, bound: float, noise_multiplier: float, batch_size: int) -> Clip:
        """The style at norm `bound`, for this noise on the whole gradient."""
        share = self.share(noise_multiplier, batch_size)
        return Quantile(bound, max(share, _LEAST_SHARE), self.quantile, self.rate)

    def share(self, noise_multiplier: float, batch_size: int) -> float:
        """Share of the step's privacy cost that the count takes: (sigma / (2 sigma_b))^2.

        Raises:
            InvalidKey: If the count would take all of it.
        """
        noise = self.count_noise or batch_size / 20
        share = (noise_multiplier / (2 * noise)) ** 2
        if not share < 1:
            given = f"{noise:g}" + ("" if self.count_noise else f", batch_size {batch_size} / 20")
            raise InvalidKey(
                "privacy.clipping.count_noise",
                f"must exceed half the noise multiplier, {noise_multiplier / 2:.3g}, got {given}: "
                f"the count alone would spend more than the budget. Give count_noise: "
                f"{noise_multiplier * 2:.3g}, which takes 6 % of it",
            )
        return share


ClippingConfig = Annotated[
    FlatClipping | AutomaticClipping | PerLayerClipping | AdaptiveClipping,
    Field(discriminator="name"),
]
"""Any style, told apart by `name`."""
