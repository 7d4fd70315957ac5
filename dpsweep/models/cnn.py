"""Plain convolutional networks with tanh, which suits clipped gradients better than ReLU.

Papernot et al. 2021, arXiv:2007.14191, show why bounded activations help under DP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsweep.models.parts import Model, Shape, make_linear, refuse_few_halvings, refuse_smaller

if TYPE_CHECKING:
    from torch import nn

_LEAST_PAPERNOT, _LEAST_LENET = 14, 12


class CnnSmall(Model):
    """Two convolutions and a linear layer, for small images and quick sweeps."""

    name: Literal["cnn_small"] = "cnn_small"

    width: int = Field(default=16, gt=0)
    """Channels of the first convolution; the second has twice as many."""

    block: int | None = Field(default=None, gt=0)
    """Block size of a circulant head, which the spectral methods need; linear if missing. Must
    divide the number of classes and that of the features, 2 * width * pixels / 16."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build: images of `shape` (C, H, W), sides at least 4 -> logits (B, num_classes)."""
        from torch import nn

        refuse_few_halvings(shape, halvings=2)
        channels, height, width = shape
        features = 2 * self.width * (height // 4) * (width // 4)
        return nn.Sequential(
            nn.Conv2d(channels, self.width, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            make_linear(features, num_classes, self.block),
        )


class CnnPapernot(Model):
    """The MNIST network of Papernot et al. 2021 (and of Tramer and Boneh): 26,010 weights.

    Two convolutions with tanh and overlapping maxima, and two linear layers.
    """

    name: Literal["cnn_papernot"] = "cnn_papernot"

    block: int | None = Field(default=None, gt=0)
    """Block size of the first linear layer, made circulant with the head; both are dense if
    missing. (The spectral methods do not take its convolutions, of stride 2.) Must divide 32 and
    the number of features, 512 on MNIST."""

    head_block: int = Field(default=2, gt=0)
    """Block size of the last layer, used with `block` only. Must divide 32 and the number of
    classes."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build: images of `shape` (C, H, W), sides at least 14 -> logits (B, num_classes)."""
        from torch import nn

        channels, height, width = shape
        refuse_smaller(shape, _LEAST_PAPERNOT, "its second convolution")
        features = 32 * ((height // 2 - 5) // 2) * ((width // 2 - 5) // 2)
        return nn.Sequential(
            nn.Conv2d(channels, 16, 8, stride=2, padding=3),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            make_linear(features, 32, self.block),
            nn.Tanh(),
            make_linear(32, num_classes, self.block and self.head_block, key="head_block"),
        )


class Cnn5(Model):
    """Five convolutions with group norm: the CNN5 of the DiSK and FFTKF papers (412k weights)."""

    name: Literal["cnn5"] = "cnn5"

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build a network: images of `shape` (C, H, W) -> logits, shape (B, num_classes)."""
        from torch import nn

        layers: list[nn.Module] = []
        channels = shape[0]
        for width in (32, 64, 128):
            layers += [
                nn.Conv2d(channels, width, 3, padding=1),
                nn.Tanh(),
                nn.MaxPool2d(2),
                nn.GroupNorm(16, width),
            ]
            channels = width
        return nn.Sequential(
            *layers,
            nn.Conv2d(channels, 256, 3, padding=1),
            nn.Tanh(),
            nn.GroupNorm(16, 256),
            nn.Conv2d(256, num_classes, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


class LeNet5(Model):
    """LeNet-5 (LeCun et al. 1998, Gradient-based learning applied to document recognition).

    Two 5x5 convolutions, each averaged over 2x2, and three linear layers: 61,706 weights. With tanh
    and a linear last layer, as the Spectral-DP paper (Feng et al. 2023) trains it on MNIST.
    """

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
        refuse_smaller(shape, _LEAST_LENET, "its second convolution")
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
