"""The layers of the vision transformer (vit.py)."""

import torch
from torch import Tensor, nn

_SCALE = 0.02


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
