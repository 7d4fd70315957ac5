"""A model of a user's that goes wrong in a Ray worker, in one of several ways: `FAULTS`."""

import ctypes
import math
import os
import resource
import sys
from pathlib import Path

import torch
from torch import nn

_ROOM_BYTES = 400 * 2**20
_EACH_BYTES = 10 * 2**20
_LEAK_BYTES = 256 * 2**20
_kept = []
_lost = []
"""What every later call in this process raises: a CUDA error that corrupts the context."""


def make(shape, num_classes, fault="none", notes=None):
    if _in_worker() and "DPSWEEP_TEST_BAD_NODE" in os.environ:
        raise OSError("this node has lost its device")
    return Faulty(shape, num_classes, fault, notes)


class Faulty(nn.Module):
    """One layer, and before it the fault; each call's process is noted in the folder `notes`."""

    def __init__(self, shape, num_classes, fault, notes):
        super().__init__()
        self.head = nn.Linear(math.prod(shape), num_classes)
        self.fault, self.notes = fault, notes and Path(notes)

    def forward(self, x):
        if _in_worker() and torch.is_grad_enabled() and len(x) > 8:  # in training alone
            if self.notes:
                (self.notes / f"{self.fault}-{os.getpid()}").touch()
            if self.fault == "lost_once":
                lost_once(x, self.notes)
            FAULTS[self.fault](x)
            if _lost:
                raise _lost[0]
        return self.head(x.flatten(1))


def _in_worker():
    return sys.argv[0].endswith("default_worker.py")


def segfault(x):
    ctypes.string_at(0)


def hang(x):
    """In C, with the interpreter's lock held: no Python code of the process runs any more."""
    ctypes.PyDLL(None).sleep(1000)


def leak(x):
    _kept.append(torch.ones(_LEAK_BYTES, dtype=torch.uint8))


def memory(x):
    """A real allocation, by the number of examples, that fails if the process may not grow."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * os.sysconf("SC_PAGE_SIZE") + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        torch.empty(len(x) * _EACH_BYTES, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def always_memory(x):
    """The same, however few the examples are."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), before[1]))
    try:
        torch.empty(_ROOM_BYTES, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def lost(x):
    """As after an illegal memory access: this process can use its GPU no more."""
    message = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_"
    _lost.append(torch.AcceleratorError(message))


def lost_once(x, notes):
    """The same, in the first process that has the trial."""
    if len(list(notes.glob("lost_once-*"))) == 1:
        lost(x)


def nothing(x):
    pass


FAULTS = {
    "none": nothing,
    "lost": lost,
    "lost_once": nothing,
    "segfault": segfault,
    "hang": hang,
    "leak": leak,
    "memory": memory,
    "always_memory": always_memory,
}
