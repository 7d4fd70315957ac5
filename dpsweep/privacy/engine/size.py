"""Choice of the physical batch, from the memory that one example takes.

On a CPU the limit is its caches, and what autograd keeps for an example is a good measure. On a GPU
the limit is its memory, where a wrong guess ends the trial: there the engine itself is run on a few
examples, at all points of the method's query, and every tensor is counted.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpsweep.core.inputs import apply_model, map_inputs, zero_inputs
from dpsweep.core.types import Clipped, InputSpec, Tensors
from dpsweep.privacy.clip import Clip
from dpsweep.privacy.engine.base import DrawTargets, Engine, draw_classes
from dpsweep.privacy.engine.layers import find_written_out
from dpsweep.privacy.engine.state_guard import deep_copy
from dpsweep.privacy.query import Query

_CPU_BYTES = 192 * 2**20
"""Between the cost of starting many small kernels and that of leaving the caches."""

_CPU_EXAMPLES = 256
"""More make no step faster, and float32 sums over many examples less precise."""

_PLANNED_SHARE = 0.6
"""Part of a trial's share of a GPU; the rest is for noise and filters, for library workspaces,
which no tensor shows, and for gaps in the allocator's blocks."""

_TILE = 4
"""Rows of a matrix that libraries compute together. Where threads share a matrix and fewer rows are
left over, those get another kernel, which rounds otherwise: seen with 5, 6, 7, 9, 10 and 11 rows on
two threads, and at no multiple of 4. An example's gradient would depend on its place."""

_FEW, _MORE = 4, 12
"""Examples of the first two measurements, from which the memory of one more follows."""

_COPIES = {"bookkeeping": 1, "vmap": 3, "opacus": 3}
"""Copies of a per-example gradient that an engine holds at once."""


def choose_batch(
    model: nn.Module,
    spec: InputSpec,
    batch_size: int,
    engine: str,
    copies: int = 1,
    num_devices: int = 1,
) -> int:
    """Examples to compute at once on a CPU: the expected batch in a few even parts.

    Args:
        model: The model.
        spec: Inputs of one example.
        batch_size: Expected size of a batch.
        engine: Name of the engine.
        copies: Of each example.
        num_devices: Replicas that each compute as many of these parts.
    """
    each = estimate_bytes_per_example(model, spec, engine, copies)
    parts = round(batch_size / max(1.0, min(_CPU_BYTES / each, _CPU_EXAMPLES / copies)))
    return even_part(batch_size, max(1, parts), num_devices)


def choose_gpu_batch(
    engine: Callable[[int], Engine],
    query: Query,
    clip: Clip,
    params: Tensors,
    spec: InputSpec,
    batch_size: int,
    draw_targets: DrawTargets = draw_classes,
    *,
    gpu_bytes: float,
    held_bytes: int,
    num_devices: int = 1,
) -> int:
    """Examples to compute at once on a GPU: the expected batch in a few even parts that fit.

    A function of the trial and of the GPU's total memory, not of what is free, so that a trial that
    is resumed sums in the same order.

    Args:
        engine: Makes the engine for so many examples at once.
        query: Of the method; its points are in memory together.
        clip: The style of clipping.
        params: The model's parameters, on the GPU.
        spec: Inputs of one example.
        batch_size: Expected size of a batch.
        draw_targets: Draws targets.
        gpu_bytes: Memory of the GPU that is the trial's.
        held_bytes: What lies there throughout: data, iterates, optimizer and filter state.
        num_devices: GPUs that each compute as many of these parts. The first is measured, which
            holds most.
    """

    def peak(rows: int) -> int:
        return measure_peak_bytes(engine(rows), query, clip, params, spec, rows, draw_targets)

    few, more = peak(_FEW), peak(_MORE)
    each = max(1.0, (more - few) / (_MORE - _FEW))
    left = _PLANNED_SHARE * gpu_bytes - held_bytes
    fits = max(1.0, (left - few) / each + _FEW)
    parts = math.ceil(_usual_largest(batch_size) / fits)
    # The peak is the highest of several stages, each linear in the number of examples: the one that
    # is highest for many need not be for few. So what was estimated is measured as well.
    while (at_once := even_part(batch_size, parts, num_devices)) > _MORE and (
        taken := peak(at_once)
    ) > left:
        parts = max(parts + 1, math.ceil(parts * taken / max(left, each)))
    return at_once


def even_part(batch_size: int, parts: int = 1, num_devices: int = 1) -> int:
    """Examples in each of `parts` even parts of a Poisson batch that is larger than most.

    Of several devices, each computes as many parts as the others: none waits for another's.

    >>> even_part(256, 3), even_part(256, 3, num_devices=2)
    (96, 72)
    """
    each = math.ceil(_usual_largest(batch_size) / (-(-parts // num_devices) * num_devices))
    return fill_tiles(each)


def fill_tiles(rows: int) -> int:
    """As many rows, or up to 3 more: see `whole_tiles`.

    >>> fill_tiles(3), fill_tiles(9), fill_tiles(288)
    (3, 12, 288)
    """
    return rows if rows < _TILE else -(-rows // _TILE) * _TILE


def whole_tiles(rows: int) -> int:
    """As many rows, or up to 3 fewer, so that a kernel computes each of them alike at any place.

    >>> whole_tiles(3), whole_tiles(7), whole_tiles(288)
    (3, 4, 288)
    """
    return rows if rows < _TILE else rows // _TILE * _TILE


def _usual_largest(batch_size: int) -> float:
    """Two standard deviations above the mean size of a Poisson batch."""
    return batch_size + 2 * math.sqrt(batch_size)


def measure_peak_bytes(
    engine: Engine,
    query: Query,
    clip: Clip,
    params: Tensors,
    spec: InputSpec,
    rows: int,
    draw_targets: DrawTargets = draw_classes,
) -> int:
    """Most bytes alive at once while a batch of zeros passes through `engine`.

    Weights and iterates, which lie there before, do not count.
    """
    first = next(iter(params.values()))
    inputs_B = zero_inputs(spec, rows, first)
    with torch.no_grad():
        outputs = apply_model(engine.model, zero_inputs(spec, 1, first), params)
    targets_B = draw_targets(rows, tuple(outputs.shape[1:])).to(first.device)
    if engine.copies > 1:
        inputs_B = map_inputs(lambda x: torch.stack([x] * engine.copies, 1), inputs_B)
    iterates = [{k: p.detach().clone() for k, p in params.items()} for _ in range(query.memory)]

    def sum_clipped(points: Sequence[Tensors], weights: Sequence[float]) -> Clipped:
        return engine.clipped_sum(points, weights, inputs_B, targets_B, clip)

    with PeakMemory() as memory:
        query.evaluate(sum_clipped, iterates, len(iterates))  # from this step on, all points exist
    peak: int = memory.peak
    return peak


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made within this context, below autograd and vmap.

    Attributes:
        held: Bytes alive now.
        peak: Most bytes alive at once so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._known: weakref.WeakSet[object] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        given = {x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()) not in given:
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._free, size).atexit = False

    def _free(self, size: int) -> None:
        self.held -= size


def estimate_bytes_per_example(
    model: nn.Module, spec: InputSpec, engine: str, copies: int = 1
) -> int:
    """Estimate the bytes of one example: activations, their gradients, its gradient if written out.

    Measured by passes over inputs of zeros, in which autograd notes what it keeps. What one example
    more adds is an example's own; the rest, such as spectra of the weights, is kept once.
    """
    # on a copy: a first call of the model itself would hide an initialisation from data, which
    # the state guard's check looks for later
    tried = deep_copy(model)
    kept = _measure_saved_bytes(tried, spec, 3) - _measure_saved_bytes(tried, spec, 2)
    own = find_written_out(model) if engine == "bookkeeping" else list(model.parameters())
    gradients = _COPIES[engine] * sum(p.nbytes for p in own)
    if engine == "opacus":  # it writes out one for each copy
        gradients *= copies
    return 2 * copies * kept + gradients


def _measure_saved_bytes(model: nn.Module, spec: InputSpec, num_examples: int) -> int:
    """Bytes that a pass keeps for its way back, and those of the outputs."""
    weights = {k: p.detach().requires_grad_() for k, p in model.named_parameters()}
    state = weights | {k: x.clone() for k, x in model.named_buffers()}
    kept: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x
        return x

    inputs = zero_inputs(spec, num_examples, next(iter(weights.values())))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outputs = apply_model(model, inputs, state)
    for p in state.values():
        kept.pop(p.untyped_storage()._cdata, None)
    return int(sum(x.untyped_storage().nbytes() for x in kept.values()) + outputs.nbytes)
