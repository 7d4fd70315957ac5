"""A model of your own. dpsweep calls `make`; batch norm is replaced and dropout switched off."""

from torch import nn


def make(shape: tuple[int, int, int], num_classes: int, width: int = 32) -> nn.Module:
    """A network with one hidden layer: images (B, C, H, W) -> logits (B, num_classes)."""
    channels, height, rows = shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * rows, width),
        nn.Tanh(),
        nn.Linear(width, num_classes),
    )
