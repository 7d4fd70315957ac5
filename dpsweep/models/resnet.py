"""ResNet-18 for small images, with group norm in place of batch norm.

He et al. 2016, arXiv:1512.03385, with the stem that is usual below 100 pixels: one 3x3
convolution of stride 1 and no pooling. For larger images: {name: torchvision, model: resnet18}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsweep.models.parts import Model, Shape, refuse_few_halvings

if TYPE_CHECKING:
    from torch import nn


class ResNet18(Model):
    """Two blocks in each of four stages: 11.2 million weights."""

    name: Literal["resnet18"] = "resnet18"

    width: int = Field(default=64, gt=0, multiple_of=16)
    """Channels of the first stage; each stage after it has twice as many. A multiple of 16, the
    number of groups of a norm."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build: images of `shape` (C, H, W), sides at least 8 -> logits (B, num_classes)."""
        from torch import nn

        from dpsweep.models.residual import BasicBlock

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
