"""The convolutional networks of the Spectral-DP paper, with tanh, at its tables' sizes.

Feng et al. 2023, Spectral-DP, section 4.1 and Tables 12 and 13, where the models are called
Model12 and Model13. The last layer of each gives the logits, without tanh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsweep.models.parts import Model, Shape, make_linear, refuse_few_halvings

if TYPE_CHECKING:
    from torch import nn


class Model2(Model):
    """Model2 of Spectral-DP: five convolutions, averaged over space. Has no linear layer."""

    name: Literal["model2"] = "model2"

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build: images of `shape` (C, H, W), sides at least 16 -> logits (B, num_classes)."""
        from torch import nn

        refuse_few_halvings(shape, halvings=4)
        layers: list[nn.Module] = []
        channels = shape[0]
        for width in (32, 64, 64, 64):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
            channels = width
        return nn.Sequential(
            *layers,
            nn.Conv2d(channels, num_classes, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


class Model3(Model):
    """Model3 of Spectral-DP: six convolutions and two linear layers, 120 units between them."""

    name: Literal["model3"] = "model3"

    block: int | None = Field(default=None, gt=0)
    """Block size of the first linear layer, made circulant with the head, which the spectral
    methods need; the paper's is 8. Both layers are dense if missing. Must divide 120 and the
    number of the features, 2 * pixels if 8 divides both sides."""

    head_block: int = Field(default=10, gt=0)
    """Block size of the last linear layer, used with `block` only. Must divide 120 and the number
    of classes."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build: images of `shape` (C, H, W), sides at least 8 -> logits (B, num_classes)."""
        from torch import nn

        refuse_few_halvings(shape, halvings=3)
        layers: list[nn.Module] = []
        channels, height, width = shape
        for filters in (32, 64, 128):
            for given in (channels, filters):
                layers += [nn.Conv2d(given, filters, 3, padding=1), nn.Tanh()]
            layers.append(nn.MaxPool2d(2))
            channels = filters
        features = channels * (height // 8) * (width // 8)
        head_block = None if self.block is None else self.head_block
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            make_linear(features, 120, self.block),
            nn.Tanh(),
            make_linear(120, num_classes, head_block, key="head_block"),
        )
