"""THE boundary: noise is added here, once, and what comes out is public.

    r_t = (1/B) ( sum_i clip_C(u_i)  +  sigma C z_t ),       z_t ~ N(0, I)

With correlated noise x_t = (C^-1 z)_t stands in the place of z_t (privacy/correlated.py).

B is the expected batch size, a constant: dividing by the true one would tell it. An empty
batch is released like any other, as noise alone.
"""

import math
from collections.abc import Callable, Sequence

import torch

from dpsweep.core.flat import convert
from dpsweep.core.seeds import Draws
from dpsweep.core.types import Clipped, Released
from dpsweep.privacy.noise import NoiseDraw, draw_noise, view_leaves

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
    rng: Draws | NoiseDraw,
    dtype: torch.dtype | None = None,
    correlate: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Released:
    """One use of the Gaussian mechanism with sensitivity `clip_norm`.

    Args:
        total: Sum of clipped per-example gradients, each of L2 norm at most `clip_norm`.
        clip_norm: C, in gradient units.
        noise_multiplier: sigma, the noise's standard deviation on the sum in units of C.
        batch_size: B, the expected number of examples in a batch.
        rng: The step's secret noise stream, or what a thread has drawn from it; used up here and
            nowhere else.
        dtype: Of the result; that of `total` if None.
        correlate: Makes correlated noise x_t of white noise z_t in double precision, before the
            rounding (privacy/history.py); noise is independent if None.

    Returns:
        Leaves that are views of one tensor: what keeps one of them keeps all.
    """
    scale = noise_multiplier * clip_norm
    if scale == 0:
        return Released(
            {k: (x.double() / batch_size).to(dtype or x.dtype) for k, x in total.items()}
        )
    device, sizes = next(iter(total.values())).device, [x.numel() for x in total.values()]
    pinned = device.type != "cpu"
    drawn = rng.wait(sizes) if isinstance(rng, NoiseDraw) else draw_noise(rng, sizes, pinned)
    noise = drawn.to(device, non_blocking=True)
    noise = correlate(noise) if correlate else noise  # the history stays on the device
    flat = _add_noise(convert(total.values(), torch.float64), noise, scale) / batch_size
    flat = flat.to(dtype or flat.dtype)
    shapes = [x.shape for x in total.values()]
    leaves = zip(total.items(), view_leaves(flat, shapes), strict=True)
    return Released({k: leaf.to(dtype or x.dtype) for (k, x), leaf in leaves})


def _add_noise(exact: Sequence[torch.Tensor], noise: torch.Tensor, scale: float) -> torch.Tensor:
    """`exact` plus `scale` times standard normal `noise`, in double precision, in its place.

    The noisy sum is rounded to a grid of about scale / 2^22, the same for all leaves and all
    data: the low bits of a floating-point sum tell how large its terms were (Mironov 2012).
    What float32 lost before, within a microbatch, is not undone by it
    (docs/concepts/noise-and-replay.md).
    Casting the result to float32 is post-processing.
    """
    grid = 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS)
    noise.mul_(scale)
    torch._foreach_add_(view_leaves(noise, [x.shape for x in exact]), list(exact))
    return noise.div_(grid).round_().mul_(grid)
