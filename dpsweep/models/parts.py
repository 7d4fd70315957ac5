"""Parts that models share: layers, size checks, and the base of their configs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from dpsweep.core.errors import InvalidKey, format_shape
from dpsweep.core.strict import Strict, is_unused
from dpsweep.core.types import Tensors
from dpsweep.data.base import Spec

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
"""(channels, height, width) of an image; (columns,) of a row of a table."""

Prefixes = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
"""Names of layers; each stands for all parameters below it. A YAML list."""


class Model(Strict):
    """Base of every model's config. See transfer.py for what the three keys do."""

    weights: str | None = Field(default=None, exclude_if=is_unused)
    """A local file of weights to start from, as torch.save writes a state_dict. It must be public:
    nothing here protects what those weights were trained on."""

    fresh: Prefixes | None = Field(default=None, exclude_if=is_unused)
    """Layers that start anew and are not looked up in `weights`, such as a head for other
    classes."""

    train: Prefixes | None = Field(default=None, exclude_if=is_unused)
    """Layers that are trained; all others keep their first weights, and neither noise nor the clip
    norm is spent on them. All if missing."""

    takes_rows: ClassVar[bool] = False
    """True if it takes inputs of any shape, such as rows of a table, and not images alone."""

    @property
    def public_weights(self) -> str:
        """Weights that it starts from, in words; empty if they are random."""
        return f"{self.weights} (model.weights)" if self.weights else ""

    @property
    def freezes(self) -> bool:
        """True if layers are frozen, and those before all that learns can be computed once."""
        return self.train is not None

    def build(self, shape: Shape, num_classes: int) -> nn.Module:
        """Build a network: images of `shape` (C, H, W) -> logits, shape (B, num_classes)."""
        raise NotImplementedError

    def build_for(self, spec: Spec) -> nn.Module:
        """Build a network for data of `spec`, with outputs of shape (B, *spec.outputs).

        Raises:
            InvalidKey: If it does not take inputs of that kind.
        """
        own = "Choose model.name: own, for a function of yours that builds one"
        if spec.fields:
            names = ", ".join(field.name for field in spec.fields)
            raise InvalidKey("name", f"takes one tensor, and the data give {names}. {own}")
        if len(spec.shape) != 3 and not self.takes_rows:
            shape = format_shape(spec.shape)
            raise InvalidKey(
                "name", f"takes images, and the data have {shape} numbers. Choose linear or mlp4"
            )
        return self.build(spec.shape, spec.num_classes)


def saved_tensors(model: nn.Module) -> Tensors:
    """Parameters and persistent buffers, by the names and in the order of a state_dict.

    Not `model.state_dict()`, which runs the model's own code (get_extra_state, hooks, overrides)
    and saves whatever that returns.
    """
    found: Tensors = {}
    for place, module in model.named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set  # private, and torch's only record of them
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, x in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in passing:
                own[name] = x
        found |= {f"{place}.{name}" if place else name: x for name, x in own.items()}
    return found


def make_linear(inputs: int, outputs: int, block: int | None, key: str = "block") -> nn.Module:
    """A linear layer: of circulant blocks, or dense if `block` is None.

    Raises:
        InvalidKey: Naming `key`, if the block does not divide both sizes.
    """
    from torch import nn

    from dpsweep.core.circulant import CirculantLinear

    if block is None:
        return nn.Linear(inputs, outputs)
    try:
        return CirculantLinear(inputs, outputs, block)
    except ValueError as e:
        raise InvalidKey(key, str(e).replace("CirculantLinear.block", key)) from e


def largest_divisor(most: int, size: int) -> int:
    """The largest number up to `most` that divides `size`.

    >>> largest_divisor(32, 48)
    24
    """
    return max(d for d in range(1, most + 1) if size % d == 0)


def refuse_remainder(groups: int, channels: int) -> None:
    """Raise InvalidKey if that many groups do not share `channels` evenly."""
    if channels % groups:
        raise InvalidKey(
            "groups",
            f"{groups} groups do not divide the {channels} channels evenly. Give a divisor of "
            f"{channels}",
        )


def refuse_smaller(shape: Shape, least: int, what: str) -> None:
    """Raise ValueError if `shape` has a side below `least`, which `what` takes."""
    _, height, width = shape
    if min(height, width) < least:
        raise ValueError(
            f"{what} takes images of at least {least} x {least} pixels, got {height} x {width}. "
            f"Choose another model or data set"
        )


def refuse_few_halvings(shape: Shape, halvings: int) -> None:
    """Raise ValueError if halving the sides of `shape` that often leaves no pixel."""
    refuse_smaller(shape, 2**halvings, f"each side is halved {halvings} times, which")
