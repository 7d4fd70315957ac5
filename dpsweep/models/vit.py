"""A small vision transformer.

Dosovitskiy et al. 2021, arXiv:2010.11929, in the plain form of Beyer et al. 2022,
arXiv:2205.01580: norms in front, no class token, the mean over all patches in its place. The
learned positions are a table of rows, so that every layer is one that book-keeping knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from dpsweep.core.errors import InvalidKey
from dpsweep.models.parts import Model, Shape

if TYPE_CHECKING:
    from torch import nn

_STEPS = ((64, 4), (224, 8))
"""(side, patch): the patch of images whose sides are below it. Larger ones get 16."""


class VitSmall(Model):
    """ViT-S: twelve blocks of width 384 with six heads, 21 million weights."""

    name: Literal["vit_small"] = "vit_small"

    patch: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Side of a patch, in pixels; must divide both sides. auto is 4 below 64 pixels, 8 below 224,
    16 from there."""

    width: int = Field(default=384, gt=0)
    """Numbers a patch is described by. A multiple of `heads`."""

    depth: int = Field(default=12, gt=0)
    """Number of blocks."""

    heads: int = Field(default=6, gt=0)
    """Heads of each attention."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build a network: images of `shape` (C, H, W) -> logits, shape (B, num_classes)."""
        from torch import nn

        from dpsweep.models.blocks import Block, Mean, Patches

        channels, height, width = shape
        patch = self.patch_side(shape)
        if height % patch or width % patch:
            raise InvalidKey(
                "patch", f"{patch} does not divide the sides of images of {height} x {width} pixels"
            )
        if self.width % self.heads:
            raise InvalidKey("heads", f"{self.heads} does not divide model.width: {self.width}")
        return nn.Sequential(
            Patches(channels, patch, self.width, (height // patch) * (width // patch)),
            *(Block(self.width, self.heads) for _ in range(self.depth)),
            nn.LayerNorm(self.width),
            Mean(),
            nn.Linear(self.width, num_classes),
        )

    def patch_side(self, shape: Shape) -> int:
        """Side of a patch of such images."""
        if self.patch != "auto":
            return self.patch
        side = max(shape[1:])
        return next((patch for below, patch in _STEPS if side < below), 16)
