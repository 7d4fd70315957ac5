"""The cut of a transformer whose first layers are frozen: their hidden states, computed once.

What crosses is what the first trained layer is given, and the mask. The tail is the same model with
layers in the place of the frozen ones that hand on what crossed: embeddings, masks and positions
stay its library's business, and names of parameters stay the model's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dpsweep.core.inputs import Inputs, apply_model, draw_inputs, named_fields, take_rows
from dpsweep.core.seeds import derive_public_seed
from dpsweep.core.types import InputSpec
from dpsweep.models.frozen import Cut, record_inputs
from dpsweep.models.text import TextModel

_TRIED = 4


@dataclass(frozen=True, eq=False)
class TextCut(Cut):
    """A cut with hidden states and the mask in one tensor: shape (T, E + 1) for one example."""

    def features(self, inputs: Inputs) -> Tensor:
        """Hidden states and mask, shape (B, T, E + 1), for tokens of length T or less."""
        assert isinstance(inputs, dict)
        mask_BT = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        hidden_BTE = super().features(inputs)
        mask_BT1 = mask_BT[:, :, None].to(hidden_BTE)
        # zeros at padding, where what is computed would depend on how much of it there is
        both = torch.cat([hidden_BTE * mask_BT1, mask_BT1], -1)
        return pad(both, (0, 0, 0, self.shape[0] - both.shape[1]))


class _Given(nn.Module):
    """Layer that returns hidden states that were computed before, whatever it is called with."""

    def __init__(self, *, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple
        self.hidden_BTE: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.hidden_BTE,) if self.in_tuple else self.hidden_BTE


class TextTail(TextModel):
    """Hidden states and mask, shape (B, T, E + 1) -> logits, from the first trained layer on."""

    def __init__(self, model: TextModel, stack: str, first: int, *, in_tuple: bool) -> None:
        given = _Given(in_tuple=in_tuple)
        layers = model.get_submodule(stack)
        assert isinstance(layers, nn.ModuleList)
        kept = nn.ModuleList([given] * first + list(layers[first:]))
        whole = _copy_with(model, stack.split("."), kept)
        super().__init__(whole.body, getattr(model, "head", None), model.pool)
        self._given = (given,)  # in a tuple, as its place in the tree is that of the layers

    def forward(self, crossing_BTE: Tensor) -> Tensor:  # type: ignore[override]
        """(B, T, E + 1) -> (B, K), or (B, T, K)."""
        mask_BT = (crossing_BTE[:, :, -1] > 0.5).long()
        (given,) = self._given
        given.hidden_BTE = crossing_BTE[:, :, :-1]
        try:
            return super().forward(torch.zeros_like(mask_BT), mask_BT)
        finally:
            given.hidden_BTE = None


def find_text_cut(model: TextModel, spec: InputSpec) -> TextCut | None:
    """Find the cut before the first layer that is trained; None if there is none that is certain.

    Args:
        model: With its frozen parameters as buffers. Called on random tokens.
        spec: Inputs of one example.
    """
    found = _find_first_trained(model)
    if found is None:
        return None
    stack, first = found
    layers = model.get_submodule(stack)
    assert isinstance(layers, nn.ModuleList)
    rng = torch.Generator().manual_seed(derive_public_seed(0, "cut"))
    inputs = draw_inputs(spec, _TRIED, rng, next(model.parameters()))
    assert isinstance(inputs, dict)
    returned: list[Any] = []
    hook = layers[first - 1].register_forward_hook(lambda _, given, output: returned.append(output))
    try:
        with record_inputs(layers[first]) as crossed:
            expected = apply_model(model, inputs)
    finally:
        hook.remove()
    if len(crossed) != 1 or not crossed[0] or not isinstance(crossed[0][0], Tensor):
        return None
    length = named_fields(spec)[0].shape[-1]
    hidden_BTE = crossed[0][0]
    if hidden_BTE.requires_grad or hidden_BTE.shape[:2] != (_TRIED, length):
        return None
    tail = TextTail(model, stack, first, in_tuple=isinstance(returned[0], tuple))
    cut = TextCut(model, layers[first], tail, (length, hidden_BTE.shape[2] + 1))
    order = torch.arange(_TRIED).flip(0)  # another order, so that a second way in shows
    with torch.no_grad():
        alone = tail(cut.features(take_rows(inputs, order)))[order]
    if alone.dim() == 3:  # of a language model, whose positions at padding count for nothing
        own = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        alone, expected = alone[own], expected[own]
    same = alone.shape == expected.shape and torch.allclose(alone, expected, rtol=1e-4, atol=1e-5)
    return cut if same else None


def _find_first_trained(model: TextModel) -> tuple[str, int] | None:
    """Find the list of layers that has all that is trained but the head, and the first of them."""
    trained = [k for k, _ in model.named_parameters() if not k.startswith("head.")]
    for path, stack in model.named_modules():
        inside = f"{path}."
        if isinstance(stack, nn.ModuleList) and all(k.startswith(inside) for k in trained):
            first = min((int(k.removeprefix(inside).split(".")[0]) for k in trained), default=0)
            return (path, first) if first else None
    return None


def _copy_with(module: nn.Module, path: list[str], part: nn.Module) -> Any:
    """Copy the modules on `path`, with `part` at its end; all others are shared."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    inner = module.get_submodule(path[0])
    copied._modules[path[0]] = part if len(path) == 1 else _copy_with(inner, path[1:], part)
    return copied
