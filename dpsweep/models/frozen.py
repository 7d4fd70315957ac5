"""The cut of a model into a frozen part, which never changes, and the part that is trained.

What the frozen part makes of an image is a fixed public function of that image alone, so it can be
computed once for all steps (transfer.py says what is frozen). A cut is only made where it is
certain: behind it all parameters are, and nothing but what crosses it goes in.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from dpsweep.core.inputs import Inputs, apply_model, draw_inputs
from dpsweep.core.seeds import derive_public_seed
from dpsweep.core.types import InputSpec

_TRIED = 4


@dataclass(frozen=True, eq=False)
class Cut:
    """A model in two parts."""

    model: nn.Module  # all of it
    entrance: nn.Module  # the layer that is given what crosses the cut
    tail: nn.Module  # what follows; its parameters are the model's, by their names there
    shape: tuple[int, ...]  # of what crosses it, for one example

    @torch.no_grad()
    def features(self, inputs: Inputs) -> Tensor:
        """Tensors that cross the cut, shape (B, *shape), for scaled inputs (B, ...)."""
        with record_inputs(self.entrance) as crossed:
            apply_model(self.model, inputs)
        between: Tensor = crossed[0][0]
        return between


def find_cut(model: nn.Module, spec: InputSpec) -> Cut | None:
    """The cut before the first layer that is trained; None if there is none that is certain.

    Args:
        model: With its frozen parameters as buffers. Called on random inputs.
        spec: Inputs of one example.
    """
    if not any(True for _ in model.buffers()):
        return None
    path, entrance, tail = _split_model(model)
    if entrance is model:
        return None
    like = next(model.parameters())
    rng = torch.Generator().manual_seed(derive_public_seed(0, "cut"))
    inputs = draw_inputs(spec, _TRIED, rng, like)
    with record_inputs(entrance) as crossed, torch.enable_grad():
        output = apply_model(model, inputs)
    if len(crossed) != 1 or len(crossed[0]) != 1 or not isinstance(crossed[0][0], Tensor):
        return None
    between = crossed[0][0]
    if between.requires_grad or len(between) != _TRIED:  # depends on a weight, or mixes axes
        return None
    with torch.no_grad():  # in another order, so that a second way in, or a memory, shows
        alone = tail(between.flip(0)).flip(0)
    if alone.shape != output.shape or not torch.allclose(alone, output, rtol=1e-4, atol=1e-5):
        return None
    named = reduce(lambda inner, name: nn.Sequential(OrderedDict({name: inner})), path[::-1], tail)
    return Cut(model, entrance, named, tuple(between.shape[1:]))


def _split_model(model: nn.Module) -> tuple[list[str], nn.Module, nn.Module]:
    """Names down to the smallest module with all parameters, its first trained layer, its tail."""
    path: list[str] = []
    while True:
        children = list(model.named_children())
        trained = [i for i, (_, child) in enumerate(children) if _is_trained(child)]
        if not trained or list(model.parameters(recurse=False)):
            return path, model, model
        in_order = type(model) is nn.Sequential
        if len(trained) > 1 or (in_order and trained[0] < len(children) - 1):
            if not in_order or not trained[0]:
                return path, model, model
            rest = children[trained[0] :]
            return path, rest[0][1], nn.Sequential(OrderedDict(rest))
        name, model = children[trained[0]]
        path.append(name)


def _is_trained(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


@contextmanager
def record_inputs(layer: nn.Module) -> Iterator[list[tuple[Any, ...]]]:
    """Record the arguments of each call of the layer within this context."""
    calls: list[tuple[Any, ...]] = []
    hook = layer.register_forward_pre_hook(lambda _, given: calls.append(given))
    try:
        yield calls
    finally:
        hook.remove()
