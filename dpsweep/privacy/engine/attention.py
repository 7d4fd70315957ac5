"""Multi-head attention in pieces, so that its projections can be recorded like linear layers.

torch computes nn.MultiheadAttention in one function, which shows no hook what its projections
see. Here is the same function with the two projections called one by one.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from dpsweep.privacy.engine.alignment import aligned_linear

IN, OUT = "/in", "/out"
"""Names of the two projections, after the name of their layer."""

Note = Callable[[str, tuple[Any, ...], Tensor], None]


def can_attend(layer: nn.Module) -> bool:
    """True if `attend` computes what `layer` does."""
    return (
        type(layer) is nn.MultiheadAttention
        and "forward" not in vars(layer)
        and layer._qkv_same_embed_dim
        and layer.bias_k is None
        and not layer.add_zero_attn
        and not layer.dropout
    )


def attend(
    layer: nn.MultiheadAttention,
    note: Note,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention.forward, with its arguments and what it returns.

    A query whose keys are all masked gets zeros, or, if `need_weights`, NaN: so does torch.

    Calls `note(piece, inputs, output)` for each projection: ("/in", (x, slot), ...) where slot
    says which third of the weight's rows was used (0, 1, 2 for query, key, value), or None for
    all of them, and ("/out", (x,), ...).

    Raises:
        ValueError: If `is_causal` is set without a mask, as torch does.
    """
    if is_causal and attn_mask is None:
        raise ValueError("MultiheadAttention: is_causal is a hint, and needs attn_mask beside it")
    same = query is key and key is value
    given: tuple[Tensor, ...] = (query,) if same else (query, key, value)
    if not layer.batch_first:
        given = tuple(x.transpose(0, 1) for x in given)
    q, k, v = _project(layer, note, given)
    scores = q @ k.transpose(-1, -2) / sqrt(q.shape[-1])
    if attn_mask is not None:
        scores = _apply_mask(scores, attn_mask)
    if key_padding_mask is not None:
        scores = _apply_mask(scores, key_padding_mask[:, None, None, :])
    masked = attn_mask is not None or key_padding_mask is not None
    attention = _masked_softmax(scores) if masked and not need_weights else scores.softmax(-1)
    mixed = (attention @ v).transpose(1, 2).flatten(2)
    output = aligned_linear(mixed, layer.out_proj.weight, layer.out_proj.bias)
    note(OUT, (mixed,), output)
    if not layer.batch_first:
        output = output.transpose(0, 1)
    if not need_weights:
        return output, None
    return output, attention.mean(1) if average_attn_weights else attention


def _project(layer: nn.MultiheadAttention, note: Note, given: tuple[Tensor, ...]) -> list[Tensor]:
    """Queries, keys and values, each of shape (B, heads, T, width)."""
    weight, bias = layer.in_proj_weight, layer.in_proj_bias
    if len(given) == 1:
        whole = aligned_linear(given[0], weight, bias)
        note(IN, (given[0], None), whole)
        parts = list(whole.chunk(3, -1))
    else:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        parts = []
        for slot, (x, w, b) in enumerate(zip(given, weight.chunk(3), biases, strict=True)):
            parts.append(aligned_linear(x, w, b))
            note(IN, (x, slot), parts[-1])
    return [x.view(*x.shape[:2], layer.num_heads, -1).transpose(1, 2) for x in parts]


def _masked_softmax(scores: Tensor) -> Tensor:
    """Softmax over the keys, with zeros, and no gradient, where all of them are masked."""
    nothing = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def _apply_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Add a mask of numbers, or drop scores where a mask of booleans is True."""
    if mask.dim() == 3:
        mask = mask.view(scores.shape)
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask, float("-inf"))
    return scores + mask
