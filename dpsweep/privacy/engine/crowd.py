"""Whether examples hear of each other in batches as large as those to come.

Some models mix examples in large batches alone: statistics of many, experts of a capacity, frames
of one clip. doubt.py tries eight examples, and all that an engine is told of them; here half of a
batch is replaced by other images, louder ones, and what the model says of the rest must not change
by a bit. Nothing private is touched.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsweep.core.seeds import public_seed
from dpsweep.privacy.engine.doubt import FAILURES, away_from_zeros, raise_if_memory_ran_out

_SHOUTING = 100.0
"""Times as large are the images of the other half."""


def mixing_in_crowds(
    model: nn.Module, input_shape: tuple[int, ...], sizes: Sequence[int]
) -> str | None:
    """That examples hear of each other in batches of one of these sizes; None if in none.

    Raises:
        RuntimeError, MemoryError: If memory runs out, which says nothing of the model.
    """
    model = copy.deepcopy(model)
    rng = torch.Generator().manual_seed(public_seed(0, "crowd"))
    params = away_from_zeros(model, rng)
    like = next(iter(params.values()))

    def images(num: int) -> Tensor:
        return torch.randn(num, *input_shape, generator=rng).to(like)

    def said(inputs_B: Tensor) -> Tensor:
        with torch.enable_grad():  # as at a step, though nothing here needs a gradient
            found: Tensor = functional_call(model, params, (inputs_B,))
        return found.detach()

    try:
        for num in sizes:
            calm_B = (torch.rand(num, generator=rng) < 0.5).to(like.device)
            inputs_B, louder_B = images(num), _SHOUTING * images(num)
            before = said(inputs_B)
            for half_B in (calm_B, ~calm_B) if num == max(sizes) else (calm_B,):
                rows = half_B.view(-1, *(1,) * len(input_shape))
                after = said(torch.where(rows, inputs_B, louder_B))
                if not torch.equal(before[half_B], after[half_B]):
                    return f"examples hear of each other in batches of {num}"
    except FAILURES as e:
        raise_if_memory_ran_out(e)
        return f"{type(e).__name__}: {e}"
    return None
