"""The sides of the privacy boundary, as types.

A `PerExample` tree has touched private data one example at a time. Clipping and summing
turn it into a `Clipped` tree, whose sensitivity is known but which is still private. Noise
turns that into a `Released` tree; anything computed from it and from public state is
post-processing and costs no privacy. Only `privacy/clip.py` makes the first step and only
`privacy/release.py` the second; a filter takes `Released` alone, and mypy holds it to that.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NewType

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
"""Parameter name -> tensor. Every tree in the package has the model's own names, in its order."""

PerExample = NewType("PerExample", Tensors)
"""Leaf shape (B, *param.shape): the gradient of each of B examples. Private."""

Clipped = NewType("Clipped", Tensors)
"""Sum of examples' gradients, each of L2 norm at most clip_norm over all leaves together. Private.

Leaf shape (*param.shape), or the whitened coordinates of privacy/geometry.py."""

Released = NewType("Released", Tensors)
"""The same leaves, noisy and divided by the expected batch size. Safe to post-process."""


@dataclass(frozen=True)
class Field:
    """One named tensor of the inputs, and the numbers it may hold."""

    name: str  # the model's keyword argument, such as input_ids
    shape: tuple[int, ...]  # of one example
    # its numbers are ids from 0 to num_ids - 1, int64; None if they are floats
    num_ids: int | None = None
    # True if it is 1 at an example's own positions, which come first, and 0 at padding
    is_mask: bool = False


InputSpec = tuple[int, ...] | tuple[Field, ...]
"""Inputs of one example: the shape of one tensor of floats, or named tensors."""

EngineName = Literal["auto", "bookkeeping", "vmap", "opacus"]
"""Ways to compute per-example gradients; see privacy/engine."""

Precision = Literal["bf16", "tf32"]
"""Precisions of forward and backward passes that are lower than float32."""

Row = dict[str, float]
"""One report of a trial: `epoch`, `step`, and released or public figures by metric name."""
