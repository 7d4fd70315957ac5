"""CUDA errors that no process survives are told from all others, without their data."""

import pytest
import torch

from dpsweep.core.device import describe_device_failure

DEBUG = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
"""torch adds it to every error of CUDA's."""

STICKY = [
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "misaligned address",
    "an illegal instruction was encountered",
    "uncorrectable ECC error encountered",
    "the launch timed out and was terminated",
]


@pytest.mark.parametrize("words", STICKY)
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_an_error_that_corrupts_the_context_is_known_by_cudas_words(kind, words):
    error = kind(f"CUDA error: {words}{DEBUG} while reading 0.25")
    assert describe_device_failure(error) == words.lower()
    reworded = ValueError("reworded")
    reworded.__cause__ = error
    assert describe_device_failure(reworded) == words.lower()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(f"CUDA error: out of memory{DEBUG}"),
        RuntimeError(f"CUDA error: invalid argument{DEBUG}"),
        RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
        ValueError("device-side assert triggered"),
    ],
)
def test_other_errors_leave_the_process_as_it_is(error):
    assert describe_device_failure(error) is None


def test_a_gpu_that_does_not_answer_is_found_whatever_the_error_says(monkeypatch):
    """No GPU here: what torch says of one stands in for it."""

    def lost(device):
        raise torch.AcceleratorError(f"CUDA error: unspecified launch failure{DEBUG}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    failed = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")
    assert describe_device_failure(failed) is None
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert describe_device_failure(failed) == "unspecified launch failure"


def test_every_gpu_of_the_trial_is_asked_and_no_other(monkeypatch):
    asked = []

    def answer(device):
        asked.append(device)
        if device == 2:
            raise torch.AcceleratorError(f"CUDA error: misaligned address{DEBUG}")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1024 * (device != 1))
    monkeypatch.setattr(torch.cuda, "synchronize", answer)
    assert describe_device_failure(RuntimeError("reworded")) == "misaligned address"
    assert asked == [0, 2]
