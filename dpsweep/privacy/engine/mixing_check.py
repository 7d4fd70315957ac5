"""The batch-mixing check: whether one example's output depends on others in large batches.

Some models mix examples in large batches alone: statistics of many, experts of a capacity, frames
of one clip. gradient_check.py tries eight examples, and all that an engine records of them; here
half of a batch is replaced by other examples, louder or longer ones, and the outputs of the rest
must not change by a bit. Nothing private is touched.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpsweep.core.inputs import Inputs, draw_inputs, named_fields, select_rows, zero_inputs
from dpsweep.core.seeds import derive_public_seed
from dpsweep.core.types import InputSpec
from dpsweep.privacy.engine.calls import call_model, isolate_generators, perturb_parameters
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
