"""LeNet-5 (LeCun et al. 1998, Gradient-based learning applied to document recognition).

With tanh and a linear last layer, as the Spectral-DP paper (Feng et al. 2023) trains it on MNIST.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsweep.models.parts import Model, Shape, make_linear, refuse_smaller

if TYPE_CHECKING:
    from torch import nn

_LEAST = 12


class LeNet5(Model):
    """Two 5x5 convolutions, each averaged over 2x2, and three linear layers: 61,706 weights."""

    name: Literal["lenet5"] = "lenet5"

    block: int | None = Field(default=None, gt=0)
    """Block size of the first two linear layers, made circulant with the head, which the spectral
    methods need; all are dense if missing. Must divide 120, 84 and the number of features, 400 on
    MNIST: 1, 2 or 4."""

    head_block: int = Field(default=2, gt=0)
    """Block size of the last layer, used with `block` only. Must divide 84 and the number of
    classes."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build: images of `shape` (C, H, W), sides at least 12 -> logits (B, num_classes)."""
        from torch import nn

        channels, height, width = shape
        refuse_smaller(shape, _LEAST, "its second convolution")
        features = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
        head_block = None if self.block is None else self.head_block
        return nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=2),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            make_linear(features, 120, self.block),
            nn.Tanh(),
            make_linear(120, 84, self.block),
            nn.Tanh(),
            make_linear(84, num_classes, head_block, key="head_block"),
        )
