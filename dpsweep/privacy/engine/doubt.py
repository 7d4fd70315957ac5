"""Whether an engine tells the truth about a model: tried on random images before the first step.

A layer that changes its input in place, whose weights are also used elsewhere, or that mixes the
examples of a batch would be answered wrongly. No list of layers is complete, so each model is
compared with plain autograd, one example at a time, and watched while one example of a batch goes
wild or changes its target: nothing that the others' answers are made of may change by a bit. Large
batches are crowd.py's.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsweep.core.device import broken_device
from dpsweep.core.memory import out_of_memory
from dpsweep.core.seeds import public_seed
from dpsweep.core.types import PerExample, Tensors
from dpsweep.privacy.clip import Automatic, Clip, Flat, clipped_sum
from dpsweep.privacy.engine.base import Engine, Loss, Portion
from dpsweep.privacy.engine.bookkeeping import BookkeepingEngine
from dpsweep.privacy.engine.vmap import VmapEngine

_TOLERANCE, _FLOOR = 1e-2, 1e-3
_EXAMPLES, _COMPARED = 8, 2
_TRIED: tuple[tuple[Clip, list[float]], ...] = ((Flat(1e18), [1.0]), (Automatic(1.0), [0.5, 0.5]))
"""Clips, and weights of points that are the same. The first clip lets every answer through and
shows its scale, the second shows its norm; two points show what is left from one to the next."""

_WILD = (math.nan, 1e30, 0.0)
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


def away_from_zeros(model: nn.Module, rng: torch.Generator) -> Tensors:
    """Where a model is tried: near its weights, but not at zeros, which hide paths."""
    return {
        k: p.detach() + 0.02 * torch.randn(p.shape, generator=rng).to(p)
        for k, p in model.named_parameters()
    }


class Examined(Engine, Protocol):
    """An engine that lets several examples answer in one pass."""

    def seen(self, params: Tensors, portion: Portion) -> dict[str, list[Tensor]]:
        """Layer name -> what its answers at `params` are made of, shape (B, ...). Private."""


Make = Callable[[nn.Module, Loss, int], Examined]
"""(model, loss, max_physical_batch) -> engine."""


@dataclass(frozen=True, eq=False)
class _Case:
    """What a model is tried on.

    Attributes:
        model: A copy, called through `params`.
        loss: Loss of one example.
        params: Where it is tried; away from its zeros, which hide paths.
        inputs_B: Noise, shape (B, ...).
        targets_B: 0 and 1 in turns, for an answer to another's target to differ; 0 if the model
            has one class.
    """

    model: nn.Module
    loss: Loss
    params: Tensors
    inputs_B: Tensor
    targets_B: Tensor

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, input_shape: tuple[int, ...]) -> "_Case":
        """Draws it, and refuses a model that does not take it or has a memory of its own."""
        model = copy.deepcopy(model)
        rng = torch.Generator().manual_seed(public_seed(0, "doubt"))
        like = next(model.parameters())
        inputs_B = torch.randn(_EXAMPLES, *input_shape, generator=rng).to(like)
        params = away_from_zeros(model, rng)
        classes = _classes(model, params, inputs_B)
        targets_B = torch.arange(_EXAMPLES, device=like.device) % min(classes, 2)
        return cls(model, loss, params, inputs_B, targets_B)

    @property
    def compared(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the examples that are compared with plain autograd."""
        return self.inputs_B[:_COMPARED], self.targets_B[:_COMPARED]

    def wild(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets with another first example."""
        for value in _WILD:
            inputs_B = self.inputs_B.clone()
            inputs_B[0] = value
            yield inputs_B, self.targets_B
        targets_B = self.targets_B.clone()
        targets_B[0] = targets_B.max()
        yield self.inputs_B, targets_B


def reason_to_doubt(
    model: nn.Module, loss: Loss, input_shape: tuple[int, ...], make: Make = BookkeepingEngine
) -> str | None:
    """Why that engine cannot be used with `model`; None if it can. Nothing private is touched.

    Raises:
        ValueError: If the model changes its buffers or parameters; if plain autograd cannot run
            it; or, where book-keeping cannot be used, if vmap, which asks every example alone,
            cannot either.
    """
    case = _Case.of(model, loss, input_shape)
    reason = _reason(case, make)
    if reason and make is BookkeepingEngine:
        _check_vmap(case)
    return reason


def _reason(case: _Case, make: Make) -> str | None:
    expected = _one_at_a_time(case)
    try:
        engine = make(case.model, case.loss, _COMPARED)
        with warnings.catch_warnings():  # Opacus' hooks warn, as they will at the first step
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            return _difference(case, engine, expected) or _mixing(case, engine)
    except FAILURES as e:
        raise_if_memory_ran_out(e)
        return f"{type(e).__name__}: {e}"


def raise_if_memory_ran_out(error: Exception) -> None:
    """That says nothing of the model; who began the trial knows what to do about it.

    Nor does a GPU that this process has lost.
    """
    if out_of_memory(error) or broken_device(error):
        raise error


def _one_at_a_time(case: _Case) -> PerExample:
    answers: dict[str, list[Tensor]] = {key: [] for key in case.params}
    inputs_B, targets_B = case.compared
    for x, y in zip(torch.split(inputs_B, 1), torch.split(targets_B, 1), strict=True):
        leaves = {key: p.clone().requires_grad_() for key, p in case.params.items()}
        try:
            value = case.loss(functional_call(case.model, leaves, (x,)), y)
            grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        except FAILURES as e:
            raise_if_memory_ran_out(e)
            raise ValueError(f"autograd cannot compute the gradient of one example ({e})") from e
        for key, grad in zip(answers, grads, strict=True):
            answers[key].append(grad)
    return PerExample({k: torch.stack(g) for k, g in answers.items()})


def _check_vmap(case: _Case) -> None:
    try:
        engine = VmapEngine(case.model, case.loss, _COMPARED)
        for clip, weights in _TRIED:
            engine.clipped_sum([case.params] * len(weights), weights, *case.compared, clip)
    except FAILURES as e:
        raise_if_memory_ran_out(e)
        raise ValueError(f"vmap cannot compute it one example at a time ({e})") from e


def _difference(case: _Case, engine: Engine, answer: PerExample) -> str | None:
    """The parameter whose clipped sum is another than that of `answer`, if there is one."""
    for clip, weights in _TRIED:
        expected = clipped_sum(answer, clip)
        whole = torch.stack([leaf.norm() for leaf in expected.values()]).norm()
        if not whole > 0:
            return "no gradient on random images is finite and other than zero, to compare with"
        points = [case.params] * len(weights)
        ours = engine.clipped_sum(points, weights, *case.compared, clip)
        for key, theirs in expected.items():
            error = (ours[key] - theirs).norm()
            if not error <= _TOLERANCE * (theirs.norm() + _FLOOR * whole):
                return f"the gradient of {key!r} is not what was recorded"
    return None


def _mixing(case: _Case, engine: Examined) -> str | None:
    """The layer at which an example hears of another, if there is one."""
    present_B = torch.ones(_EXAMPLES, dtype=torch.bool, device=case.inputs_B.device)
    before = engine.seen(case.params, Portion(case.inputs_B, case.targets_B, present_B))
    for inputs_B, targets_B in case.wild():
        after = engine.seen(case.params, Portion(inputs_B, targets_B, present_B))
        for name in before | after:
            pair = before.get(name, []), after.get(name, [])
            if len(pair[0]) != len(pair[1]) or any(
                not torch.equal(a[1:], b[1:]) for a, b in zip(*pair, strict=True)
            ):
                return f"examples hear of each other, as layer {name!r} shows"
    return None


def _classes(model: nn.Module, params: Tensors, inputs_B: Tensor) -> int:
    """How many numbers the model gives for an example.

    Raises:
        ValueError: If it does not take the images, or changes its buffers or its parameters.
    """
    before = {k: x.clone() for k, x in (*params.items(), *model.named_buffers())}
    try:
        with torch.no_grad():
            functional_call(model, params, (inputs_B,))
        with torch.enable_grad():
            leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
            outputs_B: Tensor = functional_call(model, leaves, (inputs_B,))
        classes = outputs_B[0].numel()
    except FAILURES as e:
        raise_if_memory_ran_out(e)
        raise ValueError(f"it does not take a batch of {tuple(inputs_B.shape)} ({e})") from e
    for name, x in (*params.items(), *model.named_buffers()):
        if not torch.equal(x, before.get(name, x.new_zeros(0))):
            kind = "parameter" if name in params else "buffer"
            raise ValueError(
                f"its {kind} {name!r} changes when it is called: that would carry what examples "
                f"did past clipping and noise. Use layers without a memory of their own"
            )
    return classes
