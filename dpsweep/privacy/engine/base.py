"""Engines: the interface for clipped sums of per-example gradients, and its shared part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from dpsweep.core.flat import copy_flat, make_zeros
from dpsweep.core.inputs import (
    AnyInputs,
    Inputs,
    count_rows,
    device_of,
    map_inputs,
    pad_rows,
    take_rows,
)
from dpsweep.core.types import Clipped, Tensors
from dpsweep.privacy.clip import INSIDE, Clip, Quantile, add_clipped
from dpsweep.privacy.engine.state_guard import StateGuard

Loss = Callable[[Tensor, Any], Tensor]
"""(outputs of shape (B, ...), targets of shape (B, ...)) -> mean over the B examples of each one's
own loss. Engines call it with one example at a time, so that it cannot mix any."""


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of classes, in nats: a `Loss` known to take each row by itself.

    Other losses, a user's among them, are computed under vmap with one example at a time, so that
    they cannot mix any. That takes five times the kernels.
    """

    def __call__(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        return self.losses_under_vmap(outputs_B, targets_B).mean()

    def losses(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        """Loss of each example, shape (B,)."""
        return torch.nn.functional.cross_entropy(outputs_B, targets_B, reduction="none")

    def losses_under_vmap(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        """The bits of `losses`, by operations that vmap has rules for.

        Torch's own has no rule for vmap: a decomposition in Python runs instead, and imports sympy.
        It is the faster elsewhere, and its backward pass adds in one order on a GPU.
        """
        log_p_BK = torch.nn.functional.log_softmax(outputs_B, 1)
        return -log_p_BK.gather(1, targets_B[:, None]).squeeze(1)


DrawTargets = Callable[[int, tuple[int, ...]], Tensor]
"""(number of examples, shape of one's outputs) -> public targets for checks, shape (num, ...)."""


def draw_classes(num: int, outputs: tuple[int, ...]) -> Tensor:
    """Draw classes 0 and 1 in turn; 0 alone if a model has one output."""
    return torch.arange(num) % min(math.prod(outputs), 2)


class Engine(Protocol):
    """An algorithm that computes clipped sums of per-example gradients."""

    @property
    def model(self) -> nn.Module:
        """The model, called with the parameters of each point; its own tensors are not read."""

    @property
    def max_physical_batch(self) -> int:
        """Examples that are computed at once; changes a release by rounding alone."""

    @property
    def copies(self) -> int:
        """Copies in which each example comes."""

    @property
    def replicas(self) -> tuple[MicrobatchEngine, ...]:
        """The engine of each device; itself, if it has one."""

    def clipped_sum(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Inputs,
        targets_B: Inputs,
        clip: Clip,
    ) -> Clipped:
        """Sum each example's clipped gradient over the batch, in double; zeros if it is empty.

        Args:
            points: Evaluation points: parameters by name.
            weights: Weight of the gradient at each point.
            inputs_B: One tensor or several by name, shape (B, ...), or (B, copies, ...) if an
                example has several copies, whose mean gradient is its one gradient.
            targets_B: Shape (B, ...), the same for all copies; or, if they are named, shape
                (B, copies, ...), those of each copy.
            clip: Bounds each example's gradient.
        """


class Microbatch(NamedTuple):
    """A microbatch, filled up to the size that all have.

    Attributes:
        inputs_B: Shape (B, ...), or (B, copies, ...).
        targets_B: Shape (B, ...).
        present_B: False where a row only fills up the microbatch, and must add nothing.
    """

    inputs_B: Inputs
    targets_B: Inputs
    present_B: Tensor

    def flatten_copies(self, copies: int) -> Microbatch:
        """Flatten copies to examples, shape (copies * B, ...): all first ones, then all second."""
        if copies == 1:
            return self
        inputs = map_inputs(lambda x: x.transpose(0, 1).flatten(0, 1), self.inputs_B)
        targets = self.targets_B
        if isinstance(targets, dict):
            targets = map_inputs(lambda x: x.transpose(0, 1).flatten(0, 1), targets)
        else:
            targets = torch.cat([targets] * copies)
        return Microbatch(inputs, targets, self.present_B.repeat(copies))

    def to(self, device: torch.device) -> Microbatch:
        """Copy to another device, in the layout it has."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        inputs, targets = map_inputs(move, self.inputs_B), map_inputs(move, self.targets_B)
        return Microbatch(inputs, targets, move(self.present_B))


@dataclass(frozen=True)
class MicrobatchEngine:
    """The part of an engine that all share: a batch in microbatches, summed in double.

    Attributes:
        model: Called through its parameters alone; its own tensors are not read.
        loss: Loss of one example.
        max_physical_batch: Examples that are computed at once.
        copies: Number of copies of each example. Their mean gradient is clipped once: another
            weighted sum of gradients, in which the query's points differ by their inputs as well.
    """

    model: nn.Module
    loss: Loss
    max_physical_batch: int
    copies: int = field(default=1, kw_only=True)

    def clipped_sum(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Inputs,
        targets_B: Inputs,
        clip: Clip,
    ) -> Clipped:
        """See `Engine`."""
        total = self.empty_sum(points[0], clip)
        inputs_B = self.lay_out(inputs_B)
        with self.guard_points(points) as own:
            for portion in self.split(inputs_B, targets_B):
                total = add_clipped(total, self.sum_portion(own, weights, portion, clip))
        return total

    @property
    def replicas(self) -> tuple[MicrobatchEngine, ...]:
        return (self,)

    def split(self, inputs_B: Inputs, targets_B: Inputs) -> Iterator[Microbatch]:
        """Cut a batch into microbatches."""
        return split_microbatches(inputs_B, targets_B, self.max_physical_batch)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def lay_out(self, inputs_B: AnyInputs) -> AnyInputs:
        """Inputs in the memory layout that the engine is fastest on."""
        return map_inputs(self._laid_out, inputs_B)

    @contextmanager
    def guard_points(self, points: Sequence[Tensors]) -> Iterator[list[Tensors]]:
        """Yield the points for one batch; afterwards, raise if they or the model have changed.

        Raises:
            ConfigError: Naming what holds other bits.
        """
        # other objects than the iterates': what a model attaches to them does not outlive the batch
        own = [{k: self._laid_out(p).detach() for k, p in point.items()} for point in points]
        guard, before = self._guard, copies_of(x for _, x in name_tensors(own))
        yield own
        guard.check(name_tensors(own), before)

    def sum_portion(
        self, points: Sequence[Tensors], weights: Sequence[float], portion: Microbatch, clip: Clip
    ) -> Clipped:
        """Compute the clipped sum over one microbatch, at points of `guard_points`."""
        found = self._portion(points, weights, portion, clip)
        self._guard.check_objects()
        return found

    @cached_property
    def _guard(self) -> StateGuard:
        """The model's state before its first batch.

        Compared afresh at each batch, a memory that changes slowly would go unseen.
        """
        return StateGuard(self.model)

    def _portion(
        self, points: Sequence[Tensors], weights: Sequence[float], portion: Microbatch, clip: Clip
    ) -> Clipped:
        """Compute the clipped sum over one microbatch."""
        raise NotImplementedError

    def _laid_out(self, leaf: Tensor) -> Tensor:
        """Inputs, or a parameter, in the memory layout that the engine is fastest on."""
        return leaf

    def _shape(self, key: str, param: Tensor) -> tuple[int, ...]:
        """Shape of the sum of a parameter's per-example gradients."""
        return tuple(param.shape)

    def empty_sum(self, params: Tensors, clip: Clip) -> Clipped:
        """Return the sum over no examples: zeros."""
        shapes = {k: self._shape(k, p) for k, p in params.items()}
        if isinstance(clip, Quantile):
            shapes[INSIDE] = ()
        device = next(iter(params.values())).device
        return Clipped(
            dict(zip(shapes, make_zeros([*shapes.values()], torch.float64, device), strict=True))
        )


def copies_of(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Copies of some tensors; on a GPU by few kernels."""
    leaves = list(leaves)
    return copy_flat(leaves) if any(x.is_cuda for x in leaves) else [x.clone() for x in leaves]


def name_tensors(points: Sequence[Tensors]) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters at all points, with the names that errors give them."""
    for point in points:
        for name, x in point.items():
            yield f"parameter {name!r}", x


def per_example_loss(loss: Loss, outputs_B: Tensor, targets_B: Inputs) -> Tensor:
    """Compute the loss of each example by itself, shape (B,)."""
    if isinstance(loss, CrossEntropy) and isinstance(targets_B, Tensor):
        return loss.losses(outputs_B, targets_B)
    losses_B: Tensor = vmap(lambda o, y: loss(o[None], map_inputs(lambda x: x[None], y)))(
        outputs_B, targets_B
    )
    return losses_B


def split_microbatches(
    inputs_B: Inputs, targets_B: Inputs, max_physical_batch: int
) -> Iterator[Microbatch]:
    """Cut a Poisson batch into microbatches of `max_physical_batch`, none for an empty one.

    The last is filled up with its own first example. Libraries choose a kernel by the number of
    rows, and each kernel rounds otherwise. Were there fewer rows, one example more in the batch
    would change the gradients of the others, by more than a clip norm in all where weights amplify
    rounding.
    """
    total = count_rows(inputs_B)
    for start in range(0, total, max_physical_batch):
        rows = slice(start, start + max_physical_batch)
        num = min(max_physical_batch, total - start)
        # never the caller's own tensors, to which a model may attach something
        inputs, targets = take_rows(inputs_B, rows), take_rows(targets_B, rows)
        missing = max_physical_batch - num
        if missing:
            inputs, targets = pad_rows(inputs, missing), pad_rows(targets, missing)
        rows_B = torch.arange(count_rows(targets), device=device_of(targets))
        yield Microbatch(inputs, targets, rows_B < num)
