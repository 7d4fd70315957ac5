"""Plain convolutional networks with tanh, which suits clipped gradients better than ReLU.

Papernot et al. 2021, arXiv:2007.14191, show why bounded activations help under DP.
"""

from typing import Literal

from pydantic import Field
from torch import nn

from dpsweep.data.models.parts import Model, Shape, linear


class CnnSmall(Model):
    """Two convolutions and a linear layer, for small images and quick sweeps."""

    name: Literal["cnn_small"] = "cnn_small"

    width: int = Field(default=16, gt=0)
    """Channels of the first convolution; the second has twice as many."""

    block: int | None = Field(default=None, gt=0)
    """Block size of a circulant head, which the spectral methods need; linear if missing. Must
    divide the number of classes and that of the features, 2 * width * pixels / 16."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Images of `shape` (C, H, W) -> logits, shape (B, num_classes)."""
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
            linear(features, num_classes, self.block),
        )


class Cnn5(Model):
    """Five convolutions with group norm: the CNN5 of the DiSK and FFTKF papers (412k weights)."""

    name: Literal["cnn5"] = "cnn5"

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Images of `shape` (C, H, W) -> logits, shape (B, num_classes)."""
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
