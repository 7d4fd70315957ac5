"""Rules: per-example gradients of each kind of layer, from its inputs and output gradients.

A rule takes a layer and its calls at all points of the query, and returns the per-example
gradients of each of its parameters. The points lie side by side: a layer at m points is a layer at
one, over m times the positions. A layer without a rule is a black box: vmap over the layer itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.types import Tensors
from dpsweep.core.weight_standardization import StandardConv2d, standardize_weight
from dpsweep.privacy.engine.attention import IN, OUT, can_attend
from dpsweep.privacy.engine.circulant import CirculantGradients
from dpsweep.privacy.engine.conv import make_kernel_gradients
from dpsweep.privacy.engine.gradients import (
    EmbeddingRows,
    OuterProducts,
    ParameterGradients,
    WrittenOut,
)
from dpsweep.privacy.engine.records import LayerCall

Rule = Callable[[nn.Module, Sequence[LayerCall], frozenset[str]], dict[str, ParameterGradients]]
"""(layer, its calls, wanted parameters of it) -> its name within the layer -> gradients."""


@dataclass(frozen=True, eq=False)
class Site:
    """A place in a model to record.

    Attributes:
        called: Name of the layer.
        layer: The layer.
        rule: How its per-example gradients are computed.
        params: Name in the model -> name in the layer, of what it owns; shared ones too.
    """

    called: str
    layer: nn.Module
    rule: Rule
    params: Mapping[str, str]


def find_sites(model: nn.Module) -> dict[str, Site]:
    """The places to record, by name, from the root down to what has a rule.

    A module that owns parameters and has no rule is a black box with all that is in it. One that
    several hold is one place, under the first of its names, which is that of its parameters.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Site] = {}
    visited: set[int] = set()

    def put(name: str, module: nn.Module, rule: Rule, piece: str = "") -> None:
        params = {names[id(p)]: own for own, p in module.named_parameters()}
        if params:
            found[name + piece] = Site(name, module, rule, params)

    # no function that calls itself: its closure would keep the model until Python's collector runs
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        if can_attend(module):
            put(name, module, attention_in, IN)
            put(name, module, attention_out, OUT)
        elif rule := find_rule(module):
            put(name, module, rule)
        elif list(module.parameters(recurse=False)):
            put(name, module, black_box)
        else:
            children = [(f"{name}.{k}" if name else k, x) for k, x in module.named_children()]
            stack.extend(reversed(children))
    return found


def merge_calls(site: Site, calls: Sequence[LayerCall]) -> Sequence[LayerCall]:
    """The calls of a layer, those with the very same input as one, of their weighted gradient.

    A first layer is given the same examples at every point of a query, and its gradient
    sum_m w_m b_m a^T is (sum_m w_m b_m) a^T. Only where examples have one position: several
    positions of one example may cancel, and are then summed in double for all points together.
    """
    if site.rule not in _BILINEAR or any(call.inputs[0].dim() != 2 for call in calls):
        return calls
    by_input: dict[tuple[object, ...], list[LayerCall]] = {}
    for call in calls:
        by_input.setdefault(_storage_key(call.inputs[0]), []).append(call)
    return [same[0] if len(same) == 1 else _merge_same_input(same) for same in by_input.values()]


def _storage_key(leaf: Tensor) -> tuple[object, ...]:
    """Make a key that two tensors share if they are the same; records keep the storage alive."""
    where = leaf.untyped_storage()._cdata, leaf.storage_offset(), leaf.shape, leaf.stride()
    return *where, leaf.dtype, leaf.is_neg(), leaf.is_conj()


def _merge_same_input(same: Sequence[LayerCall]) -> LayerCall:
    total = _sum_parts(call.weighted(call.grad) for call in same)
    return replace(same[0], weight=1.0, grad=total)


def find_black_boxes(model: nn.Module) -> list[str]:
    """The layers that have no rule, as name (type)."""
    return [
        f"{site.called!r} ({type(site.layer).__name__})"
        for site in find_sites(model).values()
        if site.rule is black_box
    ]


def find_written_out(model: nn.Module) -> list[Tensor]:
    """The parameters whose per-example gradients may be written out."""
    rules = (conv2d, standard_conv2d, black_box)
    layers = (site.layer for site in find_sites(model).values() if site.rule in rules)
    return [p for layer in layers for p in layer.parameters()]


def find_rule(layer: nn.Module) -> Rule | None:
    """Return the rule of a layer's own class; None for a black box."""
    kind = type(layer)
    return RULES.get(kind) or _RULES_BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")


def linear(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """A -> W a + b at each position."""
    return _affine(calls, "weight", "bias", wanted)


def transposed_linear(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """A -> a W + b at each position, with W of shape (inputs, outputs), as in GPT-2."""
    return _affine(calls, "weight", "bias", wanted, transposed=True)


def attention_in(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """Queries, keys and values; where they are apart, each has its third of the rows."""

    def widen_to_all_rows(call: LayerCall) -> LayerCall:
        inputs, slot = call.inputs
        if slot is None:
            return call
        width = call.grad.shape[-1]
        rows = F.pad(call.grad, (slot * width, (2 - slot) * width))
        return LayerCall(call.weight, (inputs,), rows, call.params)

    return _affine(
        [widen_to_all_rows(call) for call in calls], "in_proj_weight", "in_proj_bias", wanted
    )


def attention_out(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """The projection behind the heads."""
    return _affine(calls, "out_proj.weight", "out_proj.bias", wanted)


def conv2d(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """See conv.py."""
    assert isinstance(layer, nn.Conv2d)
    gradients: dict[str, ParameterGradients] = {}
    if "weight" in wanted:
        gradients["weight"] = make_kernel_gradients(layer, calls)
    if "bias" in wanted:
        gradients["bias"] = WrittenOut(
            _sum_parts(call.weighted(_sum_per_channel(call.grad)) for call in calls)
        )
    return gradients


def standard_conv2d(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """Kernel gradients written out, and led back through the standardisation at each point."""
    assert isinstance(layer, StandardConv2d)
    gradients = conv2d(layer, calls, wanted - {"weight"})
    if "weight" in wanted:
        by_point: dict[int, list[LayerCall]] = {}
        for call in calls:
            by_point.setdefault(id(call.params["weight"]), []).append(call)
        parts = []
        for same in by_point.values():
            back = vjp(standardize_weight, same[0].params["weight"].detach())[1]
            parts.append(vmap(back)(make_kernel_gradients(layer, same).each())[0])
        gradients["weight"] = WrittenOut(_sum_parts(parts))
    return gradients


def norm(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """A -> W o normal(a) + b, with channels first and W of shape (C,)."""
    assert isinstance(layer, nn.GroupNorm)
    gradients: dict[str, ParameterGradients] = {}
    if "weight" in wanted:
        parts = (
            call.weighted(F.group_norm(call.inputs[0], layer.num_groups, eps=layer.eps) * call.grad)
            for call in calls
        )
        gradients["weight"] = WrittenOut(_sum_parts(_sum_per_channel(part) for part in parts))
    if "bias" in wanted:
        gradients["bias"] = WrittenOut(
            _sum_parts(call.weighted(_sum_per_channel(call.grad)) for call in calls)
        )
    return gradients


def layer_norm(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """A -> W o normal(a) + b, with W over the last axes, and positions before them."""
    assert isinstance(layer, nn.LayerNorm | nn.RMSNorm)
    shape = tuple(layer.normalized_shape)
    if isinstance(layer, nn.LayerNorm):
        normal = partial(F.layer_norm, normalized_shape=shape, eps=layer.eps)
    else:
        normal = partial(F.rms_norm, normalized_shape=shape, eps=layer.eps)
    gradients: dict[str, ParameterGradients] = {}
    if "weight" in wanted:
        parts = (call.weighted(normal(call.inputs[0]) * call.grad) for call in calls)
        gradients["weight"] = WrittenOut(_sum_parts(_sum_positions(part, shape) for part in parts))
    if "bias" in wanted:
        gradients["bias"] = WrittenOut(
            _sum_parts(call.weighted(_sum_positions(call.grad, shape)) for call in calls)
        )
    return gradients


def embedding(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """Rows of a table by number; the padding's row does not learn."""
    assert isinstance(layer, nn.Embedding)
    rows, grads = [], []
    for call in calls:
        row_BT = call.inputs[0].flatten(1)
        grad_BTE = call.weighted(call.grad).reshape(*row_BT.shape, -1)
        if layer.padding_idx is not None:
            grad_BTE = torch.where((row_BT == layer.padding_idx)[:, :, None], 0, grad_BTE)
        rows.append(row_BT)
        grads.append(grad_BTE)
    i, g = torch.cat(rows, 1), torch.cat(grads, 1)
    return {"weight": EmbeddingRows(i, g, layer.num_embeddings)}


def circulant(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """See circulant.py."""
    assert isinstance(layer, CirculantLinear)
    gradients: dict[str, ParameterGradients] = {}
    if "weight" in wanted:
        spectra = CirculantGradients.of(layer, calls)
        gradients["weight"] = (
            spectra if spectra.ghost_norm_is_cheaper else WrittenOut(spectra.each())
        )
    if "bias" in wanted:
        gradients["bias"] = WrittenOut(
            _sum_parts(call.weighted(_sum_positions(call.grad, [0])) for call in calls)
        )
    return gradients


def black_box(
    layer: nn.Module, calls: Sequence[LayerCall], wanted: frozenset[str]
) -> dict[str, ParameterGradients]:
    """b_b^T d(layer)/d(parameter) for each example b, by one reverse pass over the layer alone."""
    totals: Tensors = {}
    for call in calls:
        fixed = {k: x for k, x in call.params.items() if k not in wanted}
        at = {k: x for k, x in call.params.items() if k in wanted}

        def one(inputs: tuple[Tensor, ...], grad: Tensor, fixed: Tensors, at: Tensors) -> Tensors:
            def run(params: Tensors) -> Tensor:
                args = tuple(x[None] for x in inputs)
                output: Tensor = functional_call(layer, fixed | params, args)
                return output

            (grads,) = vjp(run, at)[1](grad[None])
            return dict(grads)

        found = vmap(one, in_dims=(0, 0, None, None))(call.inputs, call.grad, fixed, at)
        for key, leaf_B in found.items():
            part = call.weighted(leaf_B)
            totals[key] = totals[key] + part if key in totals else part
    return {key: WrittenOut(leaf_B) for key, leaf_B in totals.items()}


RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    StandardConv2d: standard_conv2d,
    nn.GroupNorm: norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: layer_norm,
    nn.Embedding: embedding,
    CirculantLinear: circulant,
}
"""Exact types: a subclass may compute something else, and is a black box."""

_RULES_BY_NAME: Mapping[str, Rule] = {"transformers.pytorch_utils.Conv1D": transposed_linear}
"""Classes of packages that need not be installed."""


_BILINEAR = frozenset({linear, circulant})
"""Rules whose weight gradient, for a given input, is linear in the output's at any point, and of
one position for an input of shape (B, features)."""


def _affine(
    calls: Sequence[LayerCall],
    weight: str,
    bias: str,
    wanted: frozenset[str],
    *,
    transposed: bool = False,
) -> dict[str, ParameterGradients]:
    inputs = [
        call.inputs[0].reshape(len(call.grad), -1, call.inputs[0].shape[-1]) for call in calls
    ]
    grads = [
        call.weighted(call.grad).reshape(len(call.grad), -1, call.grad.shape[-1]) for call in calls
    ]
    gradients: dict[str, ParameterGradients] = {}
    if weight in wanted:
        left, right = (grads, inputs) if transposed else (inputs, grads)
        outer = OuterProducts(_concatenate(left), _concatenate(right))
        gradients[weight] = outer if outer.ghost_norm_is_cheaper else WrittenOut(outer.each())
    if bias in wanted:
        gradients[bias] = WrittenOut(_sum_parts(g.sum(1) for g in grads))
    return gradients


def _concatenate(leaves: Sequence[Tensor]) -> Tensor:
    return leaves[0] if len(leaves) == 1 else torch.cat(list(leaves), 1)


def _sum_parts(parts: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def _sum_per_channel(leaf: Tensor) -> Tensor:
    """Sums over positions, shape (B, C)."""
    return leaf.sum(tuple(range(2, leaf.dim()))) if leaf.dim() > 2 else leaf


def _sum_positions(leaf: Tensor, shape: Sequence[int]) -> Tensor:
    """Sums over all axes between the first and the last len(shape)."""
    axes = tuple(range(1, leaf.dim() - len(shape)))
    return leaf.sum(axes) if axes else leaf
