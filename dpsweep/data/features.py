"""Features in the place of pixels: a fixed public function of each image alone.

As nothing in it is learned from the data, and no image's features depend on another's, adding or
removing one example changes one example's features: privacy and accounting stay as they are. The
config is checked here, without torch; the features are computed in data/scattering.py.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import ClassVar, Literal

from pydantic import Field

from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.strict import Strict, is_unused

_REMEDY = "Add it with: pip install 'dpsweep[scattering]' (or: pip install kymatio)"


class Scattering(Strict):
    """Wavelet scattering (Bruna and Mallat 2013, arXiv:1203.1513), of orders 0, 1 and 2.

    An image is filtered by wavelets of `depth` scales and `rotations` angles, its moduli once more
    by those of larger scales, and all is averaged over 2^depth x 2^depth pixels. On these features
    linear models train well under DP (Tramer and Boneh 2021, arXiv:2011.11660). Pixels lie in
    [0, 1], or are what data.normalise makes of them.
    """

    letters: ClassVar[Mapping[str, str]] = {"J": "depth", "L": "rotations"}

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

    @property
    def paths(self) -> int:
        """Features of one channel at one place: 1 + J L + L^2 J (J - 1) / 2.

        >>> Scattering().paths
        81
        """
        first = self.depth * self.rotations
        return 1 + first + self.rotations * first * (self.depth - 1) // 2

    def shape(self, image: tuple[int, ...]) -> tuple[int, ...]:
        """(channels, height, width) of what becomes of an image of such a shape.

        Raises:
            InvalidKey: If the image is too small.
        """
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
        return channels * self.paths, height // 2**self.depth, width // 2**self.depth


def refuse_missing(where: str) -> None:
    """Raise ConfigError if the package that computes scattering is not installed."""
    if find_spec("kymatio") is None:
        raise ConfigError(
            f"{where}: data.features: scattering is computed by kymatio, which is not installed "
            f"here. {_REMEDY}"
        )
