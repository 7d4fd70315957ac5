"""Layers of residual networks (resnet.py) and of the vision transformer (vit.py)."""

import torch
from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}  # never in place: engines look at the outputs
_SCALE = 0.02


class PreactivationBlock(nn.Module):
    """Two 3x3 convolutions, each behind a norm and an activation, added to what came in.

        h = act(norm(x)),    y = skip + conv(act(norm(conv(h))))

    skip is x, or a 1x1 convolution of h where stride or width change the shape.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        stride: int,
        activation: str,
        conv: type[nn.Conv2d] = nn.Conv2d,
    ) -> None:
        super().__init__()
        act = ACTIVATIONS[activation]
        self.ready = nn.Sequential(nn.GroupNorm(16, channels), act())
        self.convs = nn.Sequential(
            conv(channels, width, 3, stride, padding=1, bias=False),
            nn.GroupNorm(16, width),
            act(),
            conv(width, width, 3, padding=1, bias=False),
        )
        reshapes = stride > 1 or channels != width
        self.shortcut = conv(channels, width, 1, stride, bias=False) if reshapes else None

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, channels, H, W) -> (B, width, H / stride, W / stride), rounded up."""
        h = self.ready(x)
        skip = x if self.shortcut is None else self.shortcut(h)
        y: Tensor = skip + self.convs(h)
        return y


class BasicBlock(nn.Module):
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
