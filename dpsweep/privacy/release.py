"""THE boundary: noise is added here, once, and what comes out is public.

    r_t = (1/B) ( sum_i clip_C(u_i)  +  sigma C z_t ),       z_t ~ N(0, I)

B is the expected batch size, a constant: dividing by the true one would tell it. An empty
batch is released like any other, as noise alone.
"""

import numpy as np
import torch

from dpsweep.core.types import Clipped, Released


def release(
    total: Clipped,
    *,
    clip_norm: float,
    noise_multiplier: float,
    batch_size: int,
    rng: np.random.Generator,
) -> Released:
    """One use of the Gaussian mechanism with sensitivity `clip_norm`.

    Args:
        total: Sum of clipped answers, each of L2 norm at most `clip_norm`.
        clip_norm: C, in gradient units.
        noise_multiplier: sigma, the noise's standard deviation on the sum in units of C.
        batch_size: B, the expected number of examples in a batch.
        rng: The step's secret noise stream; used up here and nowhere else.
    """
    scale = noise_multiplier * clip_norm
    return Released(
        {k: (part + scale * _normal_like(part, rng)) / batch_size for k, part in total.items()}
    )


def _normal_like(leaf: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Independent standard normals, drawn in double precision whatever the leaf's is.

    Double draws reach further into the tails and make float32 and float64 runs see the
    same noise.
    """
    return torch.from_numpy(rng.standard_normal(tuple(leaf.shape))).to(leaf)
