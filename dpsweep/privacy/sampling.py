"""Poisson sampling: every example joins every batch independently, with probability q."""

import numpy as np
import torch

from dpsweep.core.seeds import Draws


def poisson_batch(num_examples: int, sampling_rate: float, rng: Draws) -> torch.Tensor:
    """Indices of one batch, ascending, int64, shape (|S_t|,); |S_t| is private and may be 0.

    Args:
        num_examples: N.
        sampling_rate: q = B / N, in (0, 1].
        rng: The step's secret sampling stream.
    """
    return torch.from_numpy(np.flatnonzero(rng.random(num_examples) < sampling_rate))
