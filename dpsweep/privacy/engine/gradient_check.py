"""The per-example-gradient check: whether an engine's gradients are those of plain autograd.

Tried on random inputs before the first step. A layer that changes its input in place, or whose
weights are also used elsewhere, cannot be recorded; neither can examples that mix. No list of
layers is complete, so each engine is asked the same twice, compared with plain autograd, one
example at a time, and watched while one example of a batch goes wild or changes its target: nothing
that the others' gradients are made of may change by a bit. Large batches are mixing_check.py's.

What is found has one of two consequences. A model that **cannot be recorded** is computed by vmap,
which calls it with one example at a time and is checked in the same way. A model that **remembers**
its calls, or whose gradients vmap gets wrong too, is refused: no engine is right about it.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dpsweep.core.inputs import (
    Inputs,
    apply_model,
    draw_inputs,
    extreme_inputs,
    replace_row,
    take_rows,
)
from dpsweep.core.seeds import derive_public_seed
from dpsweep.core.types import InputSpec, PerExample, Tensors
from dpsweep.privacy.clip import Automatic, Clip, Flat, clipped_sum
from dpsweep.privacy.engine.base import DrawTargets, Engine, Loss, Microbatch, draw_classes
from dpsweep.privacy.engine.bookkeeping import BookkeepingEngine
from dpsweep.privacy.engine.calls import (
    FAILURES,
    call_model,
    isolate_generators,
    perturb_parameters,
    raise_if_memory_ran_out,
)
from dpsweep.privacy.engine.repeatability import are_equal, check_repeats
from dpsweep.privacy.engine.vmap import VmapEngine

_TOLERANCE, _FLOOR = 1e-2, 1e-3
_EXAMPLES, _COMPARED = 8, 2
_TRIED: tuple[tuple[Clip, list[float]], ...] = ((Flat(1e18), [1.0]), (Automatic(1.0), [0.5, 0.5]))
"""Clips, and weights of points that are the same. The first clip lets every gradient through and
shows its scale, the second shows its norm; two points show what is left from one to the next."""


@runtime_checkable
class ExaminedEngine(Engine, Protocol):
    """An engine that computes several examples in one pass."""

    def collect_contributions(
        self, params: Tensors, portion: Microbatch
    ) -> dict[str, list[Tensor]]:
        """Layer name -> what its gradients at `params` are made of, shape (B, ...). Private."""


EngineFactory = Callable[[nn.Module, Loss, int], Engine]
"""(model, loss, max_physical_batch) -> engine."""


@dataclass(frozen=True, eq=False)
class _Case:
    """Public inputs and parameters that a model is checked on.

    Attributes:
        model: A copy, called through `params`.
        loss: Loss of one example.
        params: Point of the check; away from zeros, which hide paths.
        spec: Inputs of one example.
        inputs_B: Random, shape (B, ...).
        targets_B: Others for neighbours, so that the gradient of another's target differs.
    """

    model: nn.Module
    loss: Loss
    params: Tensors
    spec: InputSpec
    inputs_B: Inputs
    targets_B: Tensor

    @classmethod
    def of(
        cls, model: nn.Module, loss: Loss, spec: InputSpec, draw_targets: DrawTargets
    ) -> "_Case":
        """Draw it, and refuse a model that does not take it."""
        model = copy.deepcopy(model)
        rng = torch.Generator().manual_seed(derive_public_seed(0, "gradient check"))
        like = next(model.parameters())
        inputs_B = draw_inputs(spec, _EXAMPLES, rng, like, longest=0.5)
        params = perturb_parameters(model, rng)
        shape = output_shape(model, {k: p.clone() for k, p in params.items()}, inputs_B)
        targets_B = draw_targets(_EXAMPLES, shape).to(like.device)
        return cls(model, loss, params, spec, inputs_B, targets_B)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the model."""
        return next(iter(self.params.values())).dtype

    @property
    def compared(self) -> tuple[Inputs, Tensor]:
        """Inputs and targets of the examples that are compared with plain autograd."""
        return take_rows(self.inputs_B, slice(_COMPARED)), self.targets_B[:_COMPARED]

    def extreme_batches(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and targets with another first example."""
        for example in extreme_inputs(self.spec, next(iter(self.params.values()))):
            yield replace_row(self.inputs_B, 0, example), self.targets_B
        yield self.inputs_B, replace_row(self.targets_B, 0, self.targets_B[1:2])


def find_wrong_gradients(
    model: nn.Module,
    loss: Loss,
    spec: InputSpec,
    make: EngineFactory = BookkeepingEngine,
    draw_targets: DrawTargets = draw_classes,
) -> str | None:
    """Say why an engine cannot be used with `model`; None if it can. Nothing private is touched.

    Raises:
        ConfigError: If the model gives other gradients when it is asked the same again, or writes
            to what the engine's state guard watches: no engine is right about it.
        ValueError: If plain autograd cannot run it.
    """
    with isolate_generators(next(model.parameters()).device):
        case = _Case.of(model, loss, spec, draw_targets)
        expected, again = _reference_gradients(case), _reference_gradients(case)
        check_repeats(expected.values(), again.values(), case.dtype)
        try:
            engine = make(case.model, case.loss, _COMPARED)
            with warnings.catch_warnings():  # Opacus' hooks warn, as they will at the first step
                warnings.filterwarnings("ignore", "Full backward hook is firing")
                return _find_wrong_parameter(case, engine, expected) or _find_mixing_layer(
                    case, engine
                )
        except FAILURES as e:
            raise_if_memory_ran_out(e)
            return f"{type(e).__name__}: {e}"


def _reference_gradients(case: _Case) -> PerExample:
    gradients: dict[str, list[Tensor]] = {key: [] for key in case.params}
    inputs_B, targets_B = case.compared
    for i in range(_COMPARED):
        x, y = take_rows(inputs_B, slice(i, i + 1)), targets_B[i : i + 1]
        leaves = {key: p.clone().requires_grad_() for key, p in case.params.items()}
        try:
            value = case.loss(apply_model(case.model, x, leaves), y)
            grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        except FAILURES as e:
            raise_if_memory_ran_out(e)
            raise ValueError(f"autograd cannot compute the gradient of one example ({e})") from e
        for key, grad in zip(gradients, grads, strict=True):
            gradients[key].append(grad)
    return PerExample({k: torch.stack(g) for k, g in gradients.items()})


def _find_wrong_parameter(case: _Case, engine: Engine, gradient: PerExample) -> str | None:
    """The parameter whose clipped sum is another than that of `gradient`, if there is one."""
    for number, (clip, weights) in enumerate(_TRIED):
        expected = clipped_sum(gradient, clip)
        question = [case.params] * len(weights), weights, *case.compared, clip
        ours = engine.clipped_sum(*question)
        if number == 0:
            again = engine.clipped_sum(*question)
            check_repeats(ours.values(), again.values(), case.dtype)
        whole = torch.stack([leaf.norm() for leaf in expected.values()]).norm()
        if not whole > 0:
            # vmap needs no comparison to keep examples apart, and is all that is left
            nothing = "no gradient on random inputs is finite and other than zero, to compare with"
            return None if isinstance(engine, VmapEngine) else nothing
        for key, theirs in expected.items():
            error = (ours[key] - theirs).norm()
            if not error <= _TOLERANCE * (theirs.norm() + _FLOOR * whole):
                return f"the gradient of {key!r} is not that of autograd, one example at a time"
    return None


def _find_mixing_layer(case: _Case, engine: Engine) -> str | None:
    """The layer at which one example depends on another, if there is one."""
    if isinstance(engine, VmapEngine):  # which never has two examples in a call
        return None
    assert isinstance(engine, ExaminedEngine)
    present_B = torch.ones(_EXAMPLES, dtype=torch.bool, device=case.targets_B.device)
    whole = Microbatch(case.inputs_B, case.targets_B, present_B)
    before, rounding = engine.collect_contributions(case.params, whole), 0.0
    for inputs_B, targets_B in case.extreme_batches():
        after = engine.collect_contributions(
            case.params, Microbatch(inputs_B, targets_B, present_B)
        )
        for name in before | after:
            ours, theirs = ([x[1:] for x in found.get(name, [])] for found in (before, after))
            if are_equal(ours, theirs, rounding):
                continue
            # a kernel that adds in an order of its own, or a memory, is no mixing
            again = engine.collect_contributions(case.params, whole)
            rounding = check_repeats(_flatten(before), _flatten(again), case.dtype)
            if not are_equal(ours, theirs, rounding):
                return f"examples mix, as layer {name!r} shows"
    return None


def _flatten(seen: dict[str, list[Tensor]]) -> list[Tensor]:
    return [x for tensors in seen.values() for x in tensors]


def output_shape(model: nn.Module, params: Tensors, inputs_B: Inputs) -> tuple[int, ...]:
    """Shape of what the model returns for one example.

    Raises:
        ValueError: If it does not take the images.
    """
    call_model(model, params, inputs_B, grad=False)
    outputs_B = call_model(model, params, inputs_B)
    try:
        return tuple(outputs_B[0].shape)
    except FAILURES as e:
        raise ValueError(f"it returns a {type(outputs_B).__name__}, no tensor of logits") from e
