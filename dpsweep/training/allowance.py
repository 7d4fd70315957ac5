"""Share of the machine that a trial may use.

Nothing here is part of a config: a trial that runs out of memory goes on with smaller portions of
its batches, and draws and releases the same (up to rounding) as it would have with larger ones.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass


@dataclass(frozen=True)
class Allowance:
    """Share of memory and GPU that a trial may use."""

    halvings: int = 0  # how often the number of examples computed at once is halved
    gpu_share: float = 1.0  # share of the GPU's memory that is the trial's, in (0, 1]
    # GPUs that share its batches, each with a model of its own; on a CPU, threads
    num_devices: int = 1
    # while what it returns lasts, the trial need not report: it makes what the trials after it find
    # ready
    excused: Callable[[], AbstractContextManager[object]] = nullcontext

    def portion(self, physical: int, batch_size: int) -> int:
        """Examples to compute at once, where the config or the engine says `physical`.

        A batch has two standard deviations more than `batch_size` examples at most, almost always,
        so that halving a larger number would change nothing.

        >>> Allowance(halvings=1).portion(1000, batch_size=100)
        60
        """
        if self.halvings == 0:
            return physical
        largest = min(physical, math.ceil(batch_size + 2 * math.sqrt(batch_size)))
        return max(1, largest // int(2**self.halvings))


WHOLE = Allowance()
"""All of it."""
