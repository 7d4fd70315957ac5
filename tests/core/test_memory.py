"""What a process holds, as Linux tells it, and which errors say that there is too little."""

import mmap

import pytest
import torch

from dpsweep.core import memory
from dpsweep.core.memory import find_exhausted_memory

SIZE = 2**26
FRESH = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Memory of its own; Python's could be what another test gave back."""


def test_own_memory_is_what_was_written_and_not_what_is_mapped(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(b"x" * SIZE)
    before, resident = memory.private_bytes(), memory.reset_peak_bytes()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[i] for i in range(0, SIZE, 4096)) > 0
        assert memory.private_bytes() - before < 0.1 * SIZE
        assert memory.reset_peak_bytes() - resident > 0.9 * SIZE
    with mmap.mmap(-1, SIZE, flags=FRESH) as block:
        for i in range(0, SIZE, 4096):
            block[i] = 1
        assert 0.9 * SIZE < memory.private_bytes() - before < 1.5 * SIZE


def test_the_peak_remembers_what_was_given_back():
    before = memory.reset_peak_bytes()
    with mmap.mmap(-1, SIZE, flags=FRESH) as block:
        for i in range(0, SIZE, 4096):
            block[i] = 1
    assert memory.peak_bytes() - before > 0.9 * SIZE


def raised(make):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        make()
    return caught.value


MEMORY = {
    "in its worker": [
        raised(lambda: torch.empty(2**60, dtype=torch.uint8)),
        raised(lambda: bytearray(2**62)),
        RuntimeError("std::bad_alloc"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    ],
    "on the GPU": [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED: not enough memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(h)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDn`"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
    ],
    None: [
        RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm`"),
        ValueError("out of memory"),
        KeyError("memory"),
    ],
}


@pytest.mark.parametrize(
    ("where", "error"), [(where, error) for where, errors in MEMORY.items() for error in errors]
)
def test_memory_that_runs_out_is_told_from_every_other_error(where, error):
    assert find_exhausted_memory(error) == where
    reworded = ValueError("reworded")
    reworded.__cause__ = error  # as `raise ... from error` does
    assert find_exhausted_memory(reworded) == where


def test_an_error_that_was_dealt_with_is_none():
    another = ValueError("another")
    another.__context__ = MemoryError()
    assert find_exhausted_memory(another) == "in its worker", "raised while that was handled"
    another.__suppress_context__ = True  # as `raise ... from None` does
    assert find_exhausted_memory(another) is None
