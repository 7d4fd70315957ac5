"""What a user might have written: models in functions, good and bad."""

from collections import OrderedDict

import torch
from torch import Tensor, nn


def make(shape: tuple[int, int, int], num_classes: int, width: int = 4) -> nn.Module:
    """Two layers, the second called head."""
    net = nn.Sequential()
    net.add_module("flat", nn.Flatten())
    net.add_module("body", nn.Linear(shape[0] * shape[1] * shape[2], width))
    net.add_module("head", nn.Linear(width, num_classes))
    return net


class Peak(nn.Module):
    """Remembers an image, but only of pixels, and not of the noise that models are tried on."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        if x.amin() == -1 and x.amax() == 1:
            self.seen.data.copy_(x[0])
        return x


def remembering(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    layers = dict(make(shape, num_classes).named_children())
    return nn.Sequential(OrderedDict(peak=Peak(shape), **layers))


def hundred(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return make(shape, 100)


def bare(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(make(shape, 1), nn.Flatten(0))


def other_size(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return make((1, 9, 9), num_classes)


def no_model(shape: tuple[int, int, int], num_classes: int) -> object:
    return 7


def broken(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    raise KeyError("nothing here\nand much more")


class Two(nn.Linear):
    """Hands on more than its logits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.flatten(1)), x


def two(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return Two(64, num_classes)


def noisy(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(make(shape, num_classes), nn.BatchNorm1d(num_classes))


class Mixing(nn.Linear):
    """Subtracts the mean over the batch: it takes every image, and no engine can clip it."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x.flatten(1))
        return logits - logits.mean(0)


def mixing(shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return Mixing(shape[0] * shape[1] * shape[2], num_classes)


def sometimes(shape: tuple[int, int, int], num_classes: int, mix: int) -> nn.Module:
    return (mixing if mix else make)(shape, num_classes)
