"""How much memory a step takes beyond what lies there before it, in a process of its own."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from dpsweep.core import memory
from dpsweep.training.race import Race, runner

_STEPS = 3


def peak_bytes(race: Race, name: str) -> int:
    """The peak of a few steps over the resident memory with data, model and optimizer in place.

    On a GPU what torch's allocator held, on a CPU what the process did. Nobody else's memory
    counts, as a new process is started.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured, race, name).result()


def _measured(race: Race, name: str) -> int:
    take = runner(race, name)
    if race.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(_STEPS):
            take()
        return torch.cuda.max_memory_allocated() - before
    before = memory.resident()
    for _ in range(_STEPS):
        take()
    return max(0, memory.peak() - before)
