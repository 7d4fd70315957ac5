"""Whether records tell the truth about a model: tried on random images before the first step.

A layer that changes its input in place, whose weights are also used elsewhere, or that mixes the
examples of a batch would be recorded wrongly. No list of layers is complete, so each model is
compared with plain autograd, one example at a time, and watched while one example of a batch goes
wild: nothing that the others' answers are made of may change by a single bit.
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsweep.core.seeds import public_seed
from dpsweep.core.types import PerExample, Tensors
from dpsweep.privacy.clip import Automatic, clipped_sum
from dpsweep.privacy.engine.base import Loss, Portion
from dpsweep.privacy.engine.bookkeeping import BookkeepingEngine
from dpsweep.privacy.engine.layers import sites
from dpsweep.privacy.engine.tape import Use, record
from dpsweep.privacy.engine.vmap import VmapEngine

_TOLERANCE = 1e-2
_EXAMPLES = 8
_CLIP = Automatic(1.0)
_WILD = (math.nan, 1e30, 0.0)
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


def reason_to_doubt(model: nn.Module, loss: Loss, input_shape: tuple[int, ...]) -> str | None:
    """Why book-keeping cannot be used with `model`; None if it can. Nothing private is touched.

    Raises:
        ValueError: If vmap, which asks every example alone, cannot run it either, or if it
            changes its buffers.
    """
    model = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(public_seed(0, "doubt"))
    like = next(model.parameters())
    inputs = torch.randn(_EXAMPLES, *input_shape, generator=rng).to(like)
    targets = torch.zeros(_EXAMPLES, dtype=torch.int64, device=like.device)
    params = {
        k: p.detach() + 0.02 * torch.randn(p.shape, generator=rng).to(p)  # zeros hide paths
        for k, p in model.named_parameters()
    }
    _refuse_memory(model, params, inputs)
    reason = _reason(model, loss, params, inputs, targets)
    if reason:
        _check_vmap(model, loss, params, inputs, targets)
    return reason


def _reason(
    model: nn.Module, loss: Loss, params: Tensors, inputs: Tensor, targets: Tensor
) -> str | None:
    expected = _one_at_a_time(model, loss, params, inputs[:2], targets[:2])
    engine = BookkeepingEngine(model, loss, 2)
    try:
        ours = engine.clipped_sum([params], [1.0], inputs[:2], targets[:2], _CLIP)
        return _difference(ours, expected) or _mixing(model, loss, params, inputs, targets)
    except _FAILURES as e:
        return f"{type(e).__name__}: {e}"


def _one_at_a_time(
    model: nn.Module, loss: Loss, params: Tensors, inputs: Tensor, targets: Tensor
) -> Tensors:
    answers: dict[str, list[Tensor]] = {key: [] for key in params}
    for x, y in zip(torch.split(inputs, 1), torch.split(targets, 1), strict=True):
        leaves = {key: p.clone().requires_grad_() for key, p in params.items()}
        value = loss(functional_call(model, leaves, (x,)), y)
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        for (key, p), grad in zip(params.items(), grads, strict=True):
            answers[key].append(torch.zeros_like(p) if grad is None else grad)
    return clipped_sum(PerExample({k: torch.stack(g) for k, g in answers.items()}), _CLIP)


def _check_vmap(
    model: nn.Module, loss: Loss, params: Tensors, inputs: Tensor, targets: Tensor
) -> None:
    try:
        VmapEngine(model, loss, 2).clipped_sum([params], [1.0], inputs[:2], targets[:2], _CLIP)
    except (*_FAILURES, NotImplementedError) as e:
        raise ValueError(f"vmap cannot compute it one example at a time ({e})") from e


def _difference(ours: Tensors, expected: Tensors) -> str | None:
    for key, theirs in expected.items():
        error = (ours[key] - theirs).norm()
        if not error <= _TOLERANCE * (theirs.norm() + 1e-3):
            return f"the gradient of {key!r} is not what was recorded"
    return None


def _mixing(
    model: nn.Module, loss: Loss, params: Tensors, inputs: Tensor, targets: Tensor
) -> str | None:
    """The layer at which an example hears of another, if there is one."""
    layers = {site.called: site.layer for site in sites(model).values()}
    present = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)

    def seen(values: Tensor) -> dict[str, list[Use]]:
        return record(model, layers, loss, params, 1.0, Portion(values, targets, present))

    before = seen(inputs)
    for wild in _WILD:
        changed = inputs.clone()
        changed[0] = wild
        for name, uses in seen(changed).items():
            for use, same in zip(uses, before[name], strict=True):
                pairs = [(use.grad, same.grad), *zip(use.inputs, same.inputs, strict=True)]
                tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
                if any(not torch.equal(a[1:], b[1:]) for a, b in tensors):
                    return f"examples hear of each other in or before layer {name!r}"
    return None


def _refuse_memory(model: nn.Module, params: Tensors, inputs: Tensor) -> None:
    before = {k: x.clone() for k, x in model.named_buffers()}
    try:
        with torch.no_grad():
            functional_call(model, params, (inputs,))
    except _FAILURES as e:
        raise ValueError(f"it does not take a batch of {tuple(inputs.shape)} ({e})") from e
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before.get(name, buffer.new_zeros(0))):
            raise ValueError(
                f"its buffer {name!r} changes when it is called: that would carry what examples "
                f"did past clipping and noise. Use layers without a memory of their own"
            )
