"""What a user might have written, meaning no harm: models that remember the examples they saw.

Each is a function for `model: own`. What they remember would reach other examples' gradients, or
the file of weights, past clipping and noise.
"""

import itertools
from collections import deque
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Shape = tuple[int, int, int]


def behind(first: nn.Module, shape: Shape, num_classes: int) -> nn.Module:
    """A layer without parameters, and a linear model on what it gives."""
    return nn.Sequential(first, nn.Flatten(), nn.Linear(prod(shape), num_classes))


class ActNorm(nn.Module):
    """Shifts and scales as its first batch asks for (Kingma and Dhariwal 2018), in attributes."""

    def __init__(self, *, only_learning: bool) -> None:
        super().__init__()
        self.only_learning = only_learning
        self.mean: Tensor | None = None
        self.std: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None and (torch.is_grad_enabled() or not self.only_learning):
            self.mean, self.std = x.mean().detach(), x.std().detach() + 1e-3
        return x if self.mean is None else (x - self.mean) / self.std


def act_norm(shape: Shape, num_classes: int, only_learning: bool = False) -> nn.Module:
    return behind(ActNorm(only_learning=only_learning), shape, num_classes)


class Cooling(nn.Module):
    """A softmax whose temperature falls with the number of calls, so with that of microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * min(1 + 0.05 * self.calls, 5.0)


class TwiceUsed(nn.Module):
    """Uses its weights where book-keeping does not look, so that vmap has to compute it."""

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.cooling = Cooling()
        self.head = nn.Linear(prod(shape), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cooling(x.flatten(1))
        return self.head(x) + x.sin() @ self.head.weight.T


def cooling(shape: Shape, num_classes: int, recorded: bool = True) -> nn.Module:
    return behind(Cooling(), shape, num_classes) if recorded else TwiceUsed(shape, num_classes)


class Tracking(nn.Module):
    """Takes off a mean of the inputs that it keeps in an attribute, from some call on.

    The calls are counted outside, as by a training loop, so that nothing shows before.
    """

    def __init__(self, way: str, after: int) -> None:
        super().__init__()
        count = itertools.count()
        self.way, self.due = way, lambda: next(count) >= after
        type(self).shared = 0.0  # of a test before
        self.mean: Any = {
            "float": 0.0,
            "string": "0",
            "tensor": torch.zeros(()),
            "in place": torch.zeros(()),
            "list": [],
            "dict": {"mean": 0.0},
            "nested": {"of": [deque(maxlen=1)]},
            "set": set(),
            "array": np.zeros(1),
            "object": SimpleNamespace(mean=0.0),
            "own object": Statistics(),
            "slots": Slots(),
            "class": None,
            "hidden layer": [nn.Linear(1, 1)],
            "generator": torch.Generator(),
        }[way]

    def forward(self, x: Tensor) -> Tensor:
        return x - self.tracked(x) if self.due() else x

    def tracked(self, x: Tensor) -> Tensor | float:
        new = x.detach().mean()
        match self.way:
            case "float":
                self.mean = 0.9 * self.mean + 0.1 * float(new)
            case "string":
                self.mean = str(float(new))
            case "tensor":
                self.mean = 0.9 * self.mean + 0.1 * new
            case "in place":
                self.mean.data.mul_(0.9).add_(0.1 * new)
            case "list":
                self.mean.append(float(new))
            case "dict":
                self.mean["mean"] = float(new)
            case "nested":
                self.mean["of"][0].append(float(new))
            case "set":
                self.mean.add(float(new))
            case "array":
                self.mean[0] = float(new)
            case "object" | "own object" | "slots":
                self.mean.mean = float(new)
            case "class":
                type(self).shared = float(new)
            case "hidden layer":
                self.mean[0].bias.data.fill_(float(new))
            case "generator":
                self.mean.manual_seed(int(1e6 * float(new.abs())))
        return new

    shared = 0.0


class Statistics:
    """An object of the user's own class."""

    mean = 0.0


class Slots:
    """The same without a `__dict__`."""

    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = 0.0


WAYS_TO_TRACK = (
    *("float", "string", "tensor", "in place", "list", "dict", "nested", "set", "array"),
    *("object", "own object", "slots", "class", "hidden layer", "generator"),
)


def tracking(
    shape: Shape, num_classes: int, way: str = "float", after: int = 100, counted: bool = False
) -> nn.Module:
    first = Tracking(way, after)
    if counted:  # the counter is an attribute too, and shows at once
        first.count = 0
        first.register_forward_pre_hook(_counted)
    return behind(first, shape, num_classes)


def _counted(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    module.count += 1


def elsewhere(shape: Shape, num_classes: int, after: int = 100) -> nn.Module:
    """Counter and mean in a closure, where no attribute shows them."""
    count, kept = itertools.count(), [torch.zeros(())]

    class Closed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if next(count) >= after:
                kept[0] = 0.9 * kept[0] + 0.1 * x.detach().mean()
            return x - kept[0]

    return behind(Closed(), shape, num_classes)


class Maxima(nn.Module):
    """Saves the largest pixels with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.detach().amax()))
        return x

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.largest)

    def set_extra_state(self, state: Tensor) -> None:
        self.largest = float(state)


def extra_state(shape: Shape, num_classes: int) -> nn.Module:
    return behind(Maxima(), shape, num_classes)


class Exporting(nn.Module):
    """A state_dict of its own, of a closure that no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        largest = [0.0]

        def note(x: Tensor) -> None:
            largest[0] = max(largest[0], float(x.detach().amax()))

        self.note = note
        self.register_state_dict_post_hook(
            lambda module, found, prefix, _: found.update(
                {f"{prefix}max": torch.tensor(largest[0])}
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        return x


def exporting(shape: Shape, num_classes: int) -> nn.Module:
    return behind(Exporting(), shape, num_classes)


class Peak(nn.Module):
    """Remembers the brightest image of an evaluation, whose images are many at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 100:
            self.peak.data.copy_(x.detach().amax())
        return x


def seen_in_evaluation(shape: Shape, num_classes: int) -> nn.Module:
    return behind(Peak(), shape, num_classes)


# Caches that depend on nothing but the shape of one image are no memory.


class Cached(nn.Module):
    """Makes at its first call what it needs of an image's shape, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.waves: dict[tuple[int, int], Tensor] = {}
        self.shape: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2], x.shape[3]
        if size not in self.waves:
            self.waves[size] = torch.linspace(0, 1, size[1]).cos().to(x)
        if not hasattr(self, "positions"):
            self.register_buffer("positions", torch.arange(size[0])[:, None], persistent=False)
            self.bias = nn.Linear(1, 1, bias=False).requires_grad_(False)
        self.shape = tuple(x.shape[1:])  # another tuple at each call, and equal
        self.half = torch.full((), 0.5)  # another tensor at each call, and equal
        return x * self.waves[size] + self.half * self.positions


def cached(shape: Shape, num_classes: int) -> nn.Module:
    return behind(Cached(), shape, num_classes)


class ByRows(nn.Module):
    """Keeps something for each size of batch: which sizes there were is a secret."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.zeros.setdefault(len(x), torch.zeros(()).to(x))


def by_rows(shape: Shape, num_classes: int) -> nn.Module:
    return behind(ByRows(), shape, num_classes)
