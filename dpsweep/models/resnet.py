"""ResNet-18 for small images, with group norm in place of batch norm.

He et al. 2016, arXiv:1512.03385, with the stem that is usual below 100 pixels: one 3x3
convolution of stride 1 and no pooling. For larger images: {name: torchvision, model: resnet18}.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from dpsweep.models.parts import Model, Shape, refuse_smaller


class ResNet18(Model):
    """Two blocks in each of four stages: 11.2 million weights."""

    name: Literal["resnet18"] = "resnet18"

    width: int = Field(default=64, gt=0, multiple_of=16)
    """Channels of the first stage; each stage after it has twice as many. A multiple of 16, the
    number of groups of a norm."""

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Images of `shape` (C, H, W), sides at least 8 -> logits, shape (B, num_classes)."""
        refuse_smaller(shape, halvings=3)
        channels = self.width
        layers: list[nn.Module] = [
            nn.Conv2d(shape[0], channels, 3, padding=1, bias=False),
            nn.GroupNorm(16, channels),
            nn.ReLU(),
        ]
        for stage in range(4):
            width = self.width * 2**stage
            layers.append(Block(channels, width, stride=2 if stage else 1))
            layers.append(Block(width, width, stride=1))
            channels = width
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
        )


class Block(nn.Module):
    """y = relu(skip + norm(conv(relu(norm(conv(x)))))), skip = x or norm(1x1 conv(x))."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.GroupNorm(16, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(16, width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.GroupNorm(16, width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, channels, H, W) -> (B, width, H / stride, W / stride), rounded up."""
        y: Tensor = (self.shortcut(x) + self.convs(x)).relu()
        return y
