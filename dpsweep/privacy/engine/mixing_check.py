"""The batch-mixing check: whether one example's output depends on others in large batches.

Some models mix examples in large batches alone: statistics of many, experts of a capacity, frames
of one clip. gradient_check.py tries eight examples, and all that an engine records of them; here
half of a batch is replaced by other examples, louder or longer ones, and the outputs of the rest
must not change by a bit. In reduced precision, nor may an example's records change with its place
in the batch. Nothing private is touched.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpsweep.core.inputs import (
    Inputs,
    apply_model,
    draw_inputs,
    named_fields,
    select_rows,
    take_rows,
    zero_inputs,
)
from dpsweep.core.seeds import derive_public_seed
from dpsweep.core.types import InputSpec
from dpsweep.privacy.engine.base import DrawTargets, Microbatch
from dpsweep.privacy.engine.calls import (
    call_model,
    draw_examples,
    isolate_generators,
    perturb_parameters,
)
from dpsweep.privacy.engine.gradient_check import ExaminedEngine
from dpsweep.privacy.engine.repeatability import are_equal, check_repeats

_LOUDER = 100.0
"""Times as large are the numbers of the other half."""


def find_mixing_sizes(model: nn.Module, spec: InputSpec, sizes: Sequence[int]) -> str | None:
    """Say in batches of which of these sizes examples mix; None if in none.

    Raises:
        ConfigError: If the same batch gives other outputs when it is asked again.
        RuntimeError, MemoryError: If memory runs out, which says nothing of the model.
    """
    model = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(derive_public_seed(0, "batch mixing"))
    point = perturb_parameters(model, rng)
    like = next(iter(point.values()))

    def draw(num: int) -> Inputs:
        return draw_inputs(spec, num, rng, like, longest=0.5)

    def draw_louder(num: int) -> Inputs:
        found = draw(num)
        if isinstance(found, Tensor):
            return _LOUDER * found
        whole = zero_inputs(spec, num, like)  # without padding
        assert isinstance(whole, dict), "both are of one spec"
        masks = {field.name: whole[field.name] for field in named_fields(spec) if field.is_mask}
        return {k: _LOUDER * x if x.is_floating_point() else x for k, x in found.items()} | masks

    def outputs(inputs_B: Inputs) -> Tensor:
        with isolate_generators(like.device):
            return call_model(model, point, inputs_B).detach()  # with gradients, as at a step

    try:
        for num in sizes:
            calm_B = (torch.rand(num, generator=rng) < 0.5).to(like.device)
            inputs_B, louder_B = draw(num), draw_louder(num)
            before = outputs(inputs_B)
            for half_B in (calm_B, ~calm_B) if num == max(sizes) else (calm_B,):
                after = outputs(select_rows(half_B, inputs_B, louder_B))
                if torch.equal(before[half_B], after[half_B]):
                    continue
                # a kernel that adds in an order of its own, or a memory, is no mixing
                rounding = check_repeats([before], [outputs(inputs_B)], like.dtype)
                if not are_equal([before[half_B]], [after[half_B]], rounding):
                    return f"examples mix in batches of {num}"
    except ValueError as e:
        return str(e)
    return None


def find_place_dependence(
    engine: ExaminedEngine, spec: InputSpec, num: int, draw_targets: DrawTargets
) -> str | None:
    """Name a layer whose records of an example change with its place or with other examples.

    By a single bit: records in reduced precision would move by 2^-8 of themselves where a kernel
    rounds otherwise, for every example of a batch. None if no layer's do.
    """
    rng = torch.Generator().manual_seed(derive_public_seed(0, "places in a batch"))
    params = perturb_parameters(engine.model, rng)
    inputs_B, other_B = (draw_examples(engine.model, num, spec, seed) for seed in range(2))
    one = take_rows(inputs_B, slice(1))
    outputs = tuple(apply_model(engine.model, one, params).shape[1:])
    device = next(iter(params.values())).device
    targets_B = draw_targets(num, outputs).to(device)
    present_B, half_B = (x.to(device) for x in (torch.ones(num) > 0, torch.arange(num) % 2 == 0))

    def records(inputs_B: Inputs, targets_B: Tensor) -> dict[str, list[Tensor]]:
        seen = engine.collect_contributions(params, Microbatch(inputs_B, targets_B, present_B))
        return {name: [_sum_bits(x) for x in tensors] for name, tensors in seen.items()}

    def differing(found: dict[str, list[Tensor]], there: Tensor, here: Tensor) -> str | None:
        for name, tensors in before.items():
            pairs = zip(tensors, found[name], strict=True)
            if not all(torch.equal(x[here], y[there]) for x, y in pairs):
                return name
        return None

    before, rows = records(inputs_B, targets_B), torch.arange(num, device=device)
    for order in (rows.roll(1), torch.randperm(num, generator=rng).to(device)):
        moved = records(take_rows(inputs_B, order), targets_B[order])
        if name := differing(moved, rows, order):
            return name
    beside_others = records(select_rows(half_B, inputs_B, other_B), targets_B)
    return differing(beside_others, rows[half_B], rows[half_B])


def _sum_bits(leaf_B: Tensor) -> Tensor:
    """Sum the words of each row, shape (B,): one other bit is seen, and no second copy is kept."""
    leaf_B = leaf_B.int() if leaf_B.dtype == torch.bool else leaf_B
    words = leaf_B.detach().reshape(len(leaf_B), -1).contiguous().view(torch.int32)
    return words.sum(1, dtype=torch.int64)
