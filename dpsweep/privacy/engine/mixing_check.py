"""The batch-mixing check: whether an example depends on others, its place or the batch's size.

Some models mix examples in large batches alone: statistics of many, experts of a capacity, frames
of one clip. gradient_check.py tries eight examples, and all that an engine records of them; here
half of a batch is replaced by other examples, louder or longer ones, and the outputs of the rest
must not change by a bit.

Nor may an example's outputs or records change with its place in the batch or the batch's size, as
where each row has weights of its own (BatchEnsemble) or positions are counted along the wrong
axis: one example more moves those after it by one place, and all their gradients change. Float32
kernels round otherwise at another place; in reduced precision no bit may differ. Nothing private is
touched.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from dpsweep.core.inputs import (
    Inputs,
    apply_model,
    device_of,
    draw_inputs,
    named_fields,
    select_rows,
    take_rows,
    zero_inputs,
)
from dpsweep.core.seeds import derive_public_seed
from dpsweep.core.types import InputSpec, Tensors
from dpsweep.privacy.engine.base import DrawTargets, Loss, Microbatch
from dpsweep.privacy.engine.calls import (
    call_model,
    draw_examples,
    isolate_generators,
    perturb_parameters,
)
from dpsweep.privacy.engine.gradient_check import EngineFactory, ExaminedEngine
from dpsweep.privacy.engine.repeatability import are_equal, check_repeats

_LOUDER = 100.0
"""Times as large are the numbers of the other half."""

_TOLERANCE = 1e-2
"""Of the largest row: more than kernels round otherwise elsewhere, as in gradient_check.py."""

_ULPS = 16.0
"""Units in the last place of the largest number of a pass that may be off in any of its numbers."""


def find_mixing_sizes(model: nn.Module, spec: InputSpec, sizes: Sequence[int]) -> str | None:
    """Say in batches of which of these sizes examples mix; None if in none.

    Outputs that depend on an example's place, or on the number of rows, count as mixed.

    Raises:
        ConfigError: If the same batch gives other outputs when it is asked again.
        RuntimeError, MemoryError: If memory runs out, which says nothing of the model.
    """
    model = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(derive_public_seed(0, "batch mixing"))
    point = perturb_parameters(model, rng)
    like = next(iter(point.values()))
    most = max(sizes)
    whole_B = draw_inputs(spec, most, rng, like, longest=0.5)

    def outputs(inputs_B: Inputs) -> Tensor:
        with isolate_generators(like.device):
            return call_model(model, point, inputs_B).detach()  # with gradients, as at a step

    try:
        seen: dict[int, Tensor] = {}
        for num in sizes:
            calm_B = (torch.rand(num, generator=rng) < 0.5).to(like.device)
            inputs_B, louder_B = take_rows(whole_B, slice(num)), _draw_louder(spec, num, rng, like)
            before = seen[num] = outputs(inputs_B)
            for half_B in (calm_B, ~calm_B) if num == most else (calm_B,):
                after = outputs(select_rows(half_B, inputs_B, louder_B))
                if torch.equal(before[half_B], after[half_B]):
                    continue
                # a kernel that adds in an order of its own, or a memory, is no mixing
                rounding = check_repeats([before], [outputs(inputs_B)], like.dtype)
                if not are_equal([before[half_B]], [after[half_B]], rounding):
                    return f"examples mix in batches of {num}"
        for num, found in seen.items():
            if not _are_close(seen[most][:num], found):
                return f"examples mix, as outputs that are others among {num} and {most} rows show"
        order = torch.randperm(most, generator=rng).to(like.device)
        if not _are_close(seen[most][order], outputs(take_rows(whole_B, order))):
            return f"examples mix, as outputs that change with their place among {most} rows show"
    except ValueError as e:
        return str(e)
    return None


def _draw_louder(spec: InputSpec, num: int, rng: torch.Generator, like: Tensor) -> Inputs:
    """Draw inputs of larger numbers, and without padding."""
    found = draw_inputs(spec, num, rng, like, longest=0.5)
    if isinstance(found, Tensor):
        return _LOUDER * found
    whole = zero_inputs(spec, num, like)
    assert isinstance(whole, dict), "both are of one spec"
    masks = {field.name: whole[field.name] for field in named_fields(spec) if field.is_mask}
    return {k: _LOUDER * x if x.is_floating_point() else x for k, x in found.items()} | masks


def find_moved_records(
    model: nn.Module,
    loss: Loss,
    spec: InputSpec,
    sizes: Sequence[int],
    make: EngineFactory,
    draw_targets: DrawTargets,
) -> str | None:
    """Name a layer whose records change with their place, with others or with the number of rows.

    By more than rounding. What backward passes alone mix is seen here. None if no layer's do.

    Args:
        model: Called in copies.
        loss: Loss of one example.
        spec: Inputs of one example.
        sizes: Numbers of rows that batches will have.
        make: Makes an engine that computes several examples in one pass.
        draw_targets: Draws targets.
    """
    num = max(sizes)
    engine = make(copy.deepcopy(model), loss, num)
    assert isinstance(engine, ExaminedEngine), "vmap never has two examples in a call"
    seen = _Records.of(engine, spec, num, draw_targets, _project, _are_close)
    calm_B, order, rng = seen.rows % 2 == 0, seen.draw_order(), seen.rng
    louder_B = _draw_louder(spec, num, rng, seen.like)
    moved = seen.record(select_rows(calm_B, seen.inputs_B, louder_B), order)
    kept_B = calm_B[order]
    few = seen.rows[: min(sizes)]
    return seen.find_differing(moved, seen.rows[kept_B], order[kept_B]) or seen.find_differing(
        seen.record(seen.inputs_B, few), few, few
    )


def find_place_dependence(
    engine: ExaminedEngine, spec: InputSpec, num: int, draw_targets: DrawTargets
) -> str | None:
    """Name a layer whose records of an example change with its place or with other examples.

    By a single bit: records in reduced precision would move by 2^-8 of themselves where a kernel
    rounds otherwise, for every example of a batch. None if no layer's do.
    """
    seen = _Records.of(engine, spec, num, draw_targets, _sum_bits, _are_equal)
    for order in (seen.rows.roll(1), seen.draw_order()):
        if name := seen.find_differing(seen.record(seen.inputs_B, order), seen.rows, order):
            return name
    half_B, other_B = seen.rows % 2 == 0, draw_examples(engine.model, num, spec, 1)
    beside_others = seen.record(select_rows(half_B, seen.inputs_B, other_B), seen.rows)
    return seen.find_differing(beside_others, seen.rows[half_B], seen.rows[half_B])


@dataclass(frozen=True, eq=False)
class _Records:
    """Records of a public batch, to be compared with later records of the same examples.

    Attributes:
        engine: To ask.
        params: At which point.
        rng: Public draws.
        inputs_B: The batch.
        targets_B: Its targets.
        rows: 0, ..., B - 1.
        measure: (B, ...) -> a few numbers of each row, so that no second copy is kept.
        are_alike: Compares such numbers, given what rounding may change in any of them.
        before: Layer -> these numbers.
    """

    engine: ExaminedEngine
    params: Tensors
    rng: torch.Generator
    inputs_B: Inputs
    targets_B: Tensor
    rows: Tensor
    measure: Callable[[Tensor], Tensor]
    are_alike: Callable[[Tensor, Tensor, float], bool]
    before: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        engine: ExaminedEngine,
        spec: InputSpec,
        num: int,
        draw_targets: DrawTargets,
        measure: Callable[[Tensor], Tensor],
        are_alike: Callable[[Tensor, Tensor, float], bool],
    ) -> "_Records":
        """Draw the batch, of `num` rows, and record it."""
        rng = torch.Generator().manual_seed(derive_public_seed(0, "places in a batch"))
        params = perturb_parameters(engine.model, rng)
        inputs_B = draw_examples(engine.model, num, spec, 0)
        outputs = tuple(apply_model(engine.model, take_rows(inputs_B, slice(1)), params).shape[1:])
        device = device_of(inputs_B)
        targets_B, rows = draw_targets(num, outputs).to(device), torch.arange(num, device=device)
        seen = cls(engine, params, rng, inputs_B, targets_B, rows, measure, are_alike)
        seen.before.update(seen.record(inputs_B, rows))
        return seen

    @property
    def like(self) -> Tensor:
        """A tensor of the model's precision and device."""
        return next(iter(self.params.values()))

    def draw_order(self) -> Tensor:
        """Draw an order of all rows."""
        return torch.randperm(len(self.rows), generator=self.rng).to(self.rows.device)

    def record(self, inputs_B: Inputs, order: Tensor) -> dict[str, list[Tensor]]:
        """Measure the records of these rows, in this order."""
        present_B = torch.ones(len(order), dtype=torch.bool, device=order.device)
        portion = Microbatch(take_rows(inputs_B, order), self.targets_B[order], present_B)
        with isolate_generators(order.device), warnings.catch_warnings():
            # Opacus' hooks warn, as they will at the first step
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            found = self.engine.collect_contributions(self.params, portion)
        return {name: [self.measure(x) for x in tensors] for name, tensors in found.items()}

    @cached_property
    def rounding(self) -> float:
        """Bound on what rounding changes: a gradient of zero on paper holds nothing else."""
        rows = (
            x.reshape(len(x), -1).double().nan_to_num(0, 0, 0)
            for xs in self.before.values()
            for x in xs
        )
        largest = max((float(x.norm(dim=1).max()) for x in rows if x.numel()), default=0.0)
        return _ULPS * torch.finfo(self.like.dtype).eps * largest

    def find_differing(
        self, found: dict[str, list[Tensor]], there: Tensor, here: Tensor
    ) -> str | None:
        """Name a layer whose rows `there` are not what rows `here` were before."""
        for name in self.before | found:
            ours, theirs = self.before.get(name, []), found.get(name, [])
            pairs = zip(ours, theirs, strict=False)
            if len(ours) != len(theirs) or not all(
                self.are_alike(x[here], y[there], self.rounding) for x, y in pairs
            ):
                return name
        return None


def _are_equal(one: Tensor, other: Tensor, rounding: float) -> bool:
    """True if rows are the same bits, whatever rounding may do."""
    return torch.equal(one, other)


def _are_close(one: Tensor, other: Tensor, rounding: float = 0.0) -> bool:
    """True if rows differ by no more than rounding at another place, relative to the largest."""
    if one.shape != other.shape:
        return False
    one, other = (x.double().reshape(len(x), math.prod(x.shape[1:])) for x in (one, other))
    largest = one.nan_to_num(0, 0, 0).norm(dim=1).max() if one.numel() else 0.0
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0, one - other).norm(dim=1)
    return bool((apart <= max(_TOLERANCE * float(largest), rounding)).all())


def _project(leaf_B: Tensor) -> Tensor:
    """Three numbers of each row, shape (B, 3), so that no second copy of the records is kept."""
    rows = leaf_B.detach().reshape(len(leaf_B), -1)
    rows = rows if rows.is_floating_point() else rows.float()
    at = torch.arange(rows.shape[1], device=rows.device)
    signs = torch.stack([(at * turn).cos().sign() for turn in (0.7, 2.3)], 1)
    return torch.cat([rows @ signs.to(rows), rows.norm(dim=1, keepdim=True)], 1)


def _sum_bits(leaf_B: Tensor) -> Tensor:
    """Sum the words of each row, shape (B,): one other bit is seen, and no second copy is kept."""
    leaf_B = leaf_B.int() if leaf_B.dtype == torch.bool else leaf_B
    words = leaf_B.detach().reshape(len(leaf_B), -1).contiguous().view(torch.int32)
    return words.sum(1, dtype=torch.int64)
