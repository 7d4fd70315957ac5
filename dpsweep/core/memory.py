"""Memory that this process holds, in bytes, and errors that mean it ran out."""

import resource
import sys
from pathlib import Path

from dpsweep.core.errors import iter_causes

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

_HOST = ("cudnn_status_internal_error_host_allocation_failed",)
_GPU = (
    "_alloc_failed",  # CUBLAS_STATUS_, CUDNN_STATUS_, CUFFT_, CUSOLVER_STATUS_, ...
    "_allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_, ...
    "cublas_status_not_initialized",  # its handle takes memory of the GPU
    "unable to find an engine",  # cuDNN's frontend: no kernel's workspace could be allocated
)
_EITHER = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
)
"""Messages of torch, NVIDIA's libraries and the C++ library, in lower case, in errors that have no
type of their own: where memory of the worker is meant, of the GPU, or of either."""


def can_measure_private_bytes() -> bool:
    """True if `private_bytes` has anything to read: on Linux."""
    return _STATUS.exists()


def private_bytes() -> int:
    """Bytes that would be free without this process: not files it has mapped; 0 if unknown.

    The data set is such a file, of which a node has one copy.
    """
    return _read_status("RssAnon") or 0


def reset_peak_bytes() -> int:
    """Start `peak_bytes` afresh, and return what the process holds now, mapped files included.

    Where the system cannot start it afresh, the peak so far.
    """
    if not _CLEAR.exists():
        return peak_bytes()
    _CLEAR.write_text(_RESET_PEAK)
    return _read_status("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """Most bytes that the process has held since `reset_peak_bytes`, or since it began."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _read_status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def find_exhausted_memory(error: BaseException) -> str | None:
    """Name the memory that ran out, if the error or one of its causes says so.

    The causes are read because a caller may reword an error of a model.

    Returns:
        "on the GPU", "in its worker", or None.
    """
    return next(filter(None, map(_exhausted_memory_in, iter_causes(error))), None)


def _exhausted_memory_in(error: BaseException) -> str | None:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "on the GPU"
    if isinstance(error, MemoryError):
        return "in its worker"
    text = str(error).lower()

    def says(words: tuple[str, ...]) -> bool:
        return any(said in text for said in words)

    if not isinstance(error, RuntimeError | OSError) or not says(_HOST + _GPU + _EITHER):
        return None
    gpu = says(_GPU) or says(("cuda", "cudnn", "cublas"))
    return "on the GPU" if gpu and not says(_HOST) else "in its worker"


def _read_status(key: str) -> int | None:
    """Read a line of Linux's account of this process, in bytes; None where there is none."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    found = (line.split()[1] for line in lines if line.startswith(key + ":"))
    size = next(found, None)
    return None if size is None else int(size) * 1024
