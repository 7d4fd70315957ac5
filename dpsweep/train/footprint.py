"""How much memory a step takes beyond what lies there before it, in a process of its own."""

import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from dpsweep.train.race import Race, runner

_STEPS = 3
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


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
    before = _resident()
    for _ in range(_STEPS):
        take()
    return max(0, _peak() - before)


def _resident() -> int:
    """Bytes held now; the peak starts from here where the system lets us."""
    if _CLEAR.exists():
        _CLEAR.write_text(_RESET_PEAK)
        return _status("VmRSS")
    return _peak()


def _peak() -> int:
    if _CLEAR.exists():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(key + ":"))
    return int(found.split()[1]) * 1024
