"""Residual networks for small images, with group norm in place of batch norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsweep.core.strict import is_unused
from dpsweep.models.parts import Model, Shape, refuse_few_halvings

if TYPE_CHECKING:
    from torch import nn


class ResNet18(Model):
    """ResNet-18 (He et al. 2016): two blocks in each of four stages, 11.2 million weights.

    arXiv:1512.03385, with the stem that is usual below 100 pixels: one 3x3 convolution of stride 1
    and no pooling. For larger images: {name: torchvision, model: resnet18}.
    """

    name: Literal["resnet18"] = "resnet18"

    width: int = Field(default=64, gt=0, multiple_of=16)
    """Channels of the first stage; each stage after it has twice as many. A multiple of 16, the
    number of groups of a norm."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build: images of `shape` (C, H, W), sides at least 8 -> logits (B, num_classes)."""
        from torch import nn

        from dpsweep.models.blocks import BasicBlock

        refuse_few_halvings(shape, halvings=3)
        channels = self.width
        layers: list[nn.Module] = [
            nn.Conv2d(shape[0], channels, 3, padding=1, bias=False),
            nn.GroupNorm(16, channels),
            nn.ReLU(),
        ]
        for stage in range(4):
            width = self.width * 2**stage
            layers.append(BasicBlock(channels, width, stride=2 if stage else 1))
            layers.append(BasicBlock(width, width, stride=1))
            channels = width
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
        )


class _Wrn(Model):
    """A wide residual network of `depth` layers, `widening` times as wide as its first.

    The name says both: wrn_{depth}_{widening}. They reach the best accuracies under DP from
    scratch. Zagoruyko & Komodakis 2016, arXiv:1605.07146, with the batch norm, which mixes
    examples, replaced by GroupNorm(16) as in De et al. 2022, arXiv:2204.13650. Norm and activation
    stand in front of each convolution. None but the last layer has a bias: the norms shift every
    channel already, and each bias would be noised like a weight. De et al. keep the biases,
    standardise the weights (`standardise`), activate before they normalise, and give each shortcut
    a norm of its own; here they share one.
    """

    name: str

    activation: Literal["relu", "tanh"] = "relu"
    """Activation after each norm. tanh is bounded, which keeps gradients small under clipping."""

    standardise: bool = Field(default=False, exclude_if=is_unused)
    """True if each kernel is brought to mean 0 and a fixed size before it is used, as De et al. do.
    Not with the spectral methods."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build: images of `shape` (C, H, W), sides at least 4 -> logits (B, num_classes)."""
        from torch import nn

        from dpsweep.core.weight_standardization import StandardConv2d
        from dpsweep.models.blocks import ACTIVATIONS, PreactivationBlock

        refuse_few_halvings(shape, halvings=2)
        depth, widening = (int(number) for number in self.name.split("_")[1:])
        channels, conv = 16, StandardConv2d if self.standardise else nn.Conv2d
        layers: list[nn.Module] = [conv(shape[0], channels, 3, padding=1, bias=False)]
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            for place in range((depth - 4) // 6):
                here = 1 if place else stride
                layers.append(
                    PreactivationBlock(channels, width * widening, here, self.activation, conv)
                )
                channels = width * widening
        return nn.Sequential(
            *layers,
            nn.GroupNorm(16, channels),
            ACTIVATIONS[self.activation](),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, num_classes),
        )


class Wrn16(_Wrn):
    """WRN-16-4: two blocks in each of three stages, 2.7 million weights."""

    name: Literal["wrn_16_4"] = "wrn_16_4"


class Wrn28(_Wrn):
    """WRN-28-4: four blocks in each of three stages, 5.8 million weights."""

    name: Literal["wrn_28_4"] = "wrn_28_4"


class Wrn40(_Wrn):
    """WRN-40-4: six blocks in each of three stages, 8.9 million weights."""

    name: Literal["wrn_40_4"] = "wrn_40_4"
