"""Poisson sampling: every example joins every batch independently, with probability q.

Cyclic, where the noise is correlated: every example belongs to one of b groups, and joins the
batches of steps g, g + b, g + 2b, ... with probability p.
"""

import numpy as np
import torch

from dpsweep.core.seeds import Draws


def draw_groups(num_examples: int, num_groups: int, rng: Draws) -> torch.Tensor:
    """Draw the group of each example, independently and uniformly, shape (N,), from 0 to b - 1.

    Once for a whole run, from its secret. Were it an example's place modulo b, or a public seed's
    draw, one example more would move all those after it to other groups.

    Args:
        num_examples: N.
        num_groups: b.
        rng: The trial's secret stream of groups.
    """
    return torch.from_numpy((rng.random(num_examples) * num_groups).astype(np.int64))


def poisson_batch(num_examples: int, sampling_rate: float, rng: Draws) -> torch.Tensor:
    """Indices of one batch, ascending, int64, shape (|S_t|,); |S_t| is private and may be 0.

    Args:
        num_examples: N.
        sampling_rate: q = B / N, in (0, 1]; p = b B / N within a group.
        rng: The step's secret sampling stream.
    """
    return torch.from_numpy(np.flatnonzero(rng.random(num_examples) < sampling_rate))
