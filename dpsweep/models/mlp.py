"""Networks without convolutions: one linear layer, and the four of the Spectral-DP paper.

Feng et al. 2023, Spectral-DP, Table 11: Model-1 and its circulant twin, 784-2048-1024-160-10.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsweep.core.strict import is_unused
from dpsweep.models.parts import Model, Shape, make_linear, refuse_remainder

if TYPE_CHECKING:
    from torch import nn

_HIDDEN = (2048, 1024, 160)


class Linear(Model):
    """Multinomial logistic regression: one linear layer over all pixels."""

    name: Literal["linear"] = "linear"

    takes_rows = True

    block: int | None = Field(default=None, gt=0)
    """Block size of a circulant layer, which the spectral methods need; dense if missing. Must
    divide the number of classes and that of the pixels times channels."""

    groups: int | None = Field(default=None, gt=0, exclude_if=is_unused)
    """Groups of channels, each brought to mean 0 and deviation 1 within each example, which asks
    nothing of the others; a divisor of the number of channels. On scattering features of grey
    images (81) 9 to 81 do well (Tramer and Boneh 2021, arXiv:2011.11660). None if missing."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build a network: images of `shape` (C, H, W) -> logits, shape (B, num_classes)."""
        from torch import nn

        layers = [nn.Flatten(), make_linear(prod(shape), num_classes, self.block)]
        if self.groups is not None:
            refuse_remainder(self.groups, shape[0])
            layers.insert(0, nn.GroupNorm(self.groups, shape[0], affine=False))
        return nn.Sequential(*layers)


class Mlp4(Model):
    """Four dense layers with tanh between them: 3.9 million weights on MNIST."""

    name: Literal["mlp4"] = "mlp4"

    takes_rows = True

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build a network: images of `shape` (C, H, W) -> logits, shape (B, num_classes)."""
        return _build_mlp(prod(shape), num_classes, None, None)


class Mlp4Circulant(Model):
    """Four layers of circulant blocks with tanh between them: 0.5 million weights on MNIST."""

    name: Literal["mlp4_circulant"] = "mlp4_circulant"

    takes_rows = True

    block: int = Field(default=8, gt=0)
    """Block size of the first three layers; print: 8 or 16. Must divide 2048, 1024, 160 and the
    number of pixels times channels."""

    head_block: int = Field(default=10, gt=0)
    """Block size of the last layer; print: 10. Must divide 160 and the number of classes."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build a network: images of `shape` (C, H, W) -> logits, shape (B, num_classes)."""
        return _build_mlp(prod(shape), num_classes, self.block, self.head_block)


def _build_mlp(
    features: int, num_classes: int, block: int | None, head_block: int | None
) -> nn.Sequential:
    from torch import nn

    layers: list[nn.Module] = [nn.Flatten()]
    for given, width in pairwise((features, *_HIDDEN)):
        layers += [make_linear(given, width, block), nn.Tanh()]
    head = make_linear(_HIDDEN[-1], num_classes, head_block, key="head_block")
    return nn.Sequential(*layers, head)
