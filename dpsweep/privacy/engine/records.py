"""Records of layer calls: inputs, and gradients of the outputs, at every point.

One forward and one backward pass a point, over a whole microbatch, and no gradient of any
weight. No layer mixes examples, so row b of every record is example b's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpsweep.core.inputs import apply_model, count_rows
from dpsweep.core.types import Precision, Tensors
from dpsweep.privacy.engine.alignment import aligned
from dpsweep.privacy.engine.attention import Note, attend, can_attend
from dpsweep.privacy.engine.base import Loss, Microbatch, per_example_loss
from dpsweep.privacy.engine.precision import backward_in, forward_in, widen


class Unrecordable(ValueError):
    """A layer whose calls cannot be told apart by example."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer at one point of the query. Private.

    Attributes:
        weight: The query's weight of the point.
        inputs: Arguments of the layer, tensors of shape (B, ...) among them.
        grad: Gradient of each example's own loss by the layer's output, shape (B, ...).
        params: The layer's parameters at the point, by their first names within the layer.
        versions: How often each of its input tensors had been written to when it was called.
    """

    weight: float
    inputs: tuple[Any, ...]
    grad: Tensor
    params: Tensors
    versions: tuple[int, ...] = ()

    def weighted(self, leaf: Tensor) -> Tensor:
        """`leaf` times the point's weight, which mostly is 1."""
        return leaf if self.weight == 1 else self.weight * leaf

    def check_unchanged(self, name: str) -> None:
        """Raise Unrecordable if an input was written to after layer `name` was given it."""
        if self.versions and self.versions != _versions(self.inputs):
            raise Unrecordable(f"what layer {name!r} is given changes in place after it was called")

    def widened(self, dtype: torch.dtype) -> LayerCall:
        """Convert a record of lower precision, so that norm and sum are computed in `dtype`."""
        inputs = tuple(widen(x, dtype) if isinstance(x, Tensor) else x for x in self.inputs)
        return LayerCall(self.weight, inputs, widen(self.grad, dtype), self.params)

    def split_copies(self, copies: int) -> list[LayerCall]:
        """Split one call of copies * B rows into a call for each copy, of B examples.

        Raises:
            Unrecordable: If an input has other rows than the output.
        """
        if copies == 1:
            return [self]
        num = len(self.grad) // copies
        own = [self.only(slice(first, first + num)) for first in range(0, len(self.grad), num)]
        return [replace(call, weight=self.weight / copies) for call in own]

    def only(self, rows: slice) -> LayerCall:
        """Restrict the call to some of the examples.

        Raises:
            Unrecordable: If an input has other rows than the output.
        """
        tensors = [x for x in self.inputs if isinstance(x, Tensor)]
        if any(len(x) != len(self.grad) for x in tensors):
            raise Unrecordable("a layer's input does not have the rows of its output")
        inputs = tuple(x[rows] if isinstance(x, Tensor) else x for x in self.inputs)
        return LayerCall(self.weight, inputs, self.grad[rows], self.params)


def record_calls(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    loss: Loss,
    params: Tensors,
    weight: float,
    portion: Microbatch,
    unaligned: Sequence[nn.Linear] = (),
    precision: Precision | None = None,
) -> dict[str, list[LayerCall]]:
    """Record the calls of each layer, in their order, during one pass at `params`.

    Args:
        model: Called through `params` alone.
        layers: Layers to record, by name.
        loss: Loss of one example.
        params: The evaluation point.
        weight: Its weight, noted with each call.
        portion: The examples.
        unaligned: Layers of the model that would round by place (alignment.py).
        precision: Of the products in both passes; that of the parameters if None. What is recorded
            is in the parameters' precision.
    """
    recorded: list[tuple[str, tuple[Any, ...], tuple[int, ...], Tensor]] = []
    num = count_rows(portion.inputs_B)

    def note(name: str, inputs: tuple[Any, ...], output: object) -> None:
        if not isinstance(output, Tensor) or not output.dim() or len(output) != num:
            raise Unrecordable(f"layer {name!r} does not hand on one tensor of all the examples")
        if not output.requires_grad:
            output.requires_grad_()
        seen = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        recorded.append((name, seen, _versions(seen), output))

    like = next(iter(params.values()))
    with torch.enable_grad():
        watched = _watch_layers(layers, note)
        with aligned(unaligned), watched, forward_in(precision, like.device):
            logits = apply_model(model, portion.inputs_B, params)
        losses_B = per_example_loss(loss, widen(logits, like.dtype), portion.targets_B)
        outputs = [output for *_, output in recorded]
        with backward_in(precision):
            # of a sum: with gradients of several losses given, torch imports sympy
            grads = torch.autograd.grad(losses_B.sum(), outputs, allow_unused=True)
    owned = _params_by_layer(model, layers, params)
    calls_by_layer: dict[str, list[LayerCall]] = {}
    for (name, inputs, versions, output), grad in zip(recorded, grads, strict=True):
        output_grad = torch.zeros_like(output) if grad is None else grad
        call = LayerCall(weight, inputs, output_grad, owned.get(name, {}), versions)
        if precision:
            call.check_unchanged(name)
            call = call.widened(like.dtype)
        calls_by_layer.setdefault(name, []).append(call)
    return calls_by_layer


def _versions(inputs: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(x._version for x in inputs if isinstance(x, Tensor))


def _params_by_layer(
    model: nn.Module, layers: Mapping[str, nn.Module], params: Tensors
) -> dict[str, Tensors]:
    """Layer name -> its parameters in `params`; one that layers share is in each of them."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        name: {own: params[names[id(p)]] for own, p in layer.named_parameters()}
        for name, layer in layers.items()
    }


def _note_pieces(note: Note, name: str) -> Note:
    return lambda piece, inputs, output: note(name + piece, inputs, output)


@contextmanager
def _watch_layers(layers: Mapping[str, nn.Module], note: Note) -> Iterator[None]:
    """Call `note` with (name, inputs, output) at each call of a layer, within this context."""
    with ExitStack() as stack:
        for name, layer in layers.items():
            if isinstance(layer, nn.MultiheadAttention) and can_attend(layer):
                vars(layer)["forward"] = partial(attend, layer, _note_pieces(note, name))
                stack.callback(vars(layer).pop, "forward")
            else:
                hook = layer.register_forward_hook(
                    lambda _, inputs, output, name=name: note(name, inputs, output)
                )
                stack.callback(hook.remove)
        yield
