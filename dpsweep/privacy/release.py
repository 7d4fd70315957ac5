"""THE boundary: noise is added here, once, and what comes out is public.

    r_t = (1/B) ( sum_i clip_C(u_i)  +  sigma C z_t ),       z_t ~ N(0, I)

B is the expected batch size, a constant: dividing by the true one would tell it. An empty
batch is released like any other, as noise alone.
"""

import math

import torch

from dpsweep.core.seeds import Draws
from dpsweep.core.types import Clipped, Released

GRID_BITS = 22
"""The grid of releases is 2^-23 to 2^-22 noise deviations wide.

Finer, and the generator's own steps would show: NumPy's tail has gaps of 2^-30 deviations from 8.2
on. At 2^-22, up to 3.65 deviations a cell's probability is the normal's up to a factor 1 +- 8e-9,
and no cell below 9.7 is empty, beyond which 3e-10 of 10^12 draws lie (tests/privacy/test_grid.py).
Coarser gains nothing: rounding adds 2^-46 of the noise's variance."""


def release(
    total: Clipped,
    *,
    clip_norm: float,
    noise_multiplier: float,
    batch_size: int,
    rng: Draws,
    dtype: torch.dtype | None = None,
) -> Released:
    """One use of the Gaussian mechanism with sensitivity `clip_norm`.

    Args:
        total: Sum of clipped answers, each of L2 norm at most `clip_norm`.
        clip_norm: C, in gradient units.
        noise_multiplier: sigma, the noise's standard deviation on the sum in units of C.
        batch_size: B, the expected number of examples in a batch.
        rng: The step's secret noise stream; used up here and nowhere else.
        dtype: Of the result; that of `total` if None.
    """
    scale = noise_multiplier * clip_norm
    return Released(
        {
            k: (_noisy(part, scale, rng) / batch_size).to(dtype or part.dtype)
            for k, part in total.items()
        }
    )


def _noisy(leaf: torch.Tensor, scale: float, rng: Draws) -> torch.Tensor:
    """`leaf` plus normal noise of standard deviation `scale`, in double precision.

    The noisy sum is rounded to a grid of about scale / 2^22, the same for all leaves and all
    data: the low bits of a floating-point sum tell how large its terms were (Mironov 2012).
    What float32 lost before, within a microbatch, is not undone by it
    (docs/concepts/noise-and-replay.md).
    Casting the result to float32 is post-processing.
    """
    exact = leaf.double()
    if scale == 0:
        return exact
    noise = torch.from_numpy(rng.standard_normal(tuple(leaf.shape))).to(exact)
    grid = 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS)
    return noise.mul_(scale).add_(exact).div_(grid).round_().mul_(grid)
