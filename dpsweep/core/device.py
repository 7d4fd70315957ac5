"""CUDA errors after which a process can use no GPU any more."""

import torch

from dpsweep.core.errors import iter_causes
from dpsweep.core.memory import find_exhausted_memory

_STICKY = (
    "an async error has occured in external entity",  # spelled so by CUDA
    "an illegal instruction was encountered",
    "an illegal memory access was encountered",
    "context is destroyed",
    "device-side assert triggered",
    "hardware stack error",
    "invalid access of peer gpu memory",
    "invalid program counter",
    "misaligned address",
    "operation not supported on global/shared address space",
    "the launch timed out and was terminated",
    "the mps client has been terminated by the server",
    "uncorrectable ecc error encountered",
    "uncorrectable nvlink error detected",
    "unspecified launch failure",
)
"""Messages of CUDA 13's runtime, in lower case, for errors that corrupt the process's context: "the
process must be terminated and relaunched" (cudaError_t in its reference). Every later call
in the process returns the same error, whosever call it is."""


def describe_device_failure(error: BaseException) -> str | None:
    """Describe the error that made the GPU unusable to this process, in CUDA's words.

    None if there was none.

    The words are CUDA's alone: the rest of the message may quote data. Libraries report such an
    error in words of their own, and a model's code may catch it. So if this process uses a GPU, the
    GPU is asked as well.
    """
    for one in iter_causes(error):
        if isinstance(one, RuntimeError) and (said := _device_failure_in(one)):
            return said
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
        # a GPU that was not used has no context, and would be given one
        used: list[int | None] = [i for i in range(count) if torch.cuda.memory_reserved(i)]
        try:
            for device in used or [None]:
                torch.cuda.synchronize(device)
        except RuntimeError as e:
            return (
                None
                if find_exhausted_memory(e)
                else _device_failure_in(e) or "the GPU does not answer any more"
            )
    return None


def _device_failure_in(error: RuntimeError) -> str | None:
    text = str(error).lower()
    return next((said for said in _STICKY if said in text), None)
