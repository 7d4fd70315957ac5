"""A small vision transformer.

Dosovitskiy et al. 2021, arXiv:2010.11929, in the plain form of Beyer et al. 2022,
arXiv:2205.01580: norms in front, no class token, the mean over all patches in its place. The
learned positions are a table of rows, so that every layer is one that book-keeping knows.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dpsweep.core.errors import Misfit
from dpsweep.models.parts import Model, Shape

_SCALE = 0.02
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
        """Images of `shape` (C, H, W) -> logits, shape (B, num_classes)."""
        channels, height, width = shape
        patch = self.patch_of(shape)
        if height % patch or width % patch:
            raise Misfit(
                "patch", f"{patch} does not divide the sides of images of {height} x {width} pixels"
            )
        if self.width % self.heads:
            raise Misfit("heads", f"{self.heads} does not divide model.width: {self.width}")
        return nn.Sequential(
            Patches(channels, patch, self.width, (height // patch) * (width // patch)),
            *(Block(self.width, self.heads) for _ in range(self.depth)),
            nn.LayerNorm(self.width),
            Mean(),
            nn.Linear(self.width, num_classes),
        )

    def patch_of(self, shape: Shape) -> int:
        """Side of a patch of such images."""
        if self.patch != "auto":
            return self.patch
        side = max(shape[1:])
        return next((patch for below, patch in _STEPS if side < below), 16)


class Patches(nn.Module):
    """Images -> patches, each a linear map of its pixels plus the row of its place."""

    def __init__(self, channels: int, patch: int, width: int, num_patches: int) -> None:
        super().__init__()
        self.pixels = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Embedding(num_patches, width)
        nn.init.normal_(self.places.weight, std=_SCALE)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, channels, H, W) -> (B, num_patches, width)."""
        patches = self.pixels(x).flatten(2).transpose(1, 2)
        numbers = torch.arange(patches.shape[1], device=x.device).expand(len(x), -1)
        y: Tensor = patches + self.places(numbers)
        return y


class Block(nn.Module):
    """x + attend(norm(x)), then x + mlp(norm(x)), the mlp four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ready = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> the same shape."""
        ready = self.ready(x)
        x = x + self.attention(ready, ready, ready, need_weights=False)[0]
        y: Tensor = x + self.mlp(x)
        return y


class Mean(nn.Module):
    """The mean over all patches."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) -> (B, width)."""
        return x.mean(1)
