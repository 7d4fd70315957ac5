"""The device that steps run on: which one, its share of a GPU's memory, and how exact it computes.

Whatever runs a step gets its device here, so that what starts in one place starts in all: a trial
(loop.py), benchmarks/step.py, the probe behind `resources.gpu: auto` and `doctor --gpu`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dpsweep.core.errors import ConfigError

_backends: Any = torch.backends  # whose stubs lack the submodules
_PRECISIONS: tuple[tuple[str, Any], ...] = (
    ("cuda.matmul", _backends.cuda.matmul),
    ("cudnn.conv", _backends.cudnn.conv),
    ("cudnn.rnn", _backends.cudnn.rnn),
    ("mkldnn.matmul", _backends.mkldnn.matmul),
    ("mkldnn.conv", _backends.mkldnn.conv),
    ("mkldnn.rnn", _backends.mkldnn.rnn),
)
"""Torch's settings for float32 products. Set one by one: a value set on one of these wins
over the one for all, `torch.backends.fp32_precision`, and the legacy `allow_tf32` flags mean
"inherit" since torch 2.9."""

_AT_IMPORT = tuple(backend.fp32_precision for _, backend in _PRECISIONS)


def open_device(
    wanted: str, gpu_share: float = 1.0, key: str = "train.device", num_devices: int = 1
) -> torch.device:
    """Prepare this process to compute on a device, or on several alike, and return the first.

    Args:
        wanted: cpu, cuda, or auto: cuda where torch sees one, cpu elsewhere.
        gpu_share: Share of the GPU's memory that torch's allocator may take, in (0, 1].
        key: Where `wanted` was written, for the error.
        num_devices: GPUs of the trial, those of `list_devices`.

    Returns:
        The device, with its index: torch takes "cuda" without one in some calls only.

    Raises:
        ConfigError: If cuda is wanted and torch sees none, or too few, or GPUs of several kinds;
            or if torch does not multiply float32 as IEEE 754 has it.
    """
    use_ieee_float32()
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"{key}: cuda, and torch sees no CUDA device in this process. Give the trial a GPU "
            f"(resources.gpu: 1 in a sweep), or write cpu"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    found = torch.cuda.device_count() - torch.cuda.current_device()
    if found < num_devices:
        raise ConfigError(
            f"resources.gpu: {num_devices}, and torch sees {found} in this process. Give fewer, or "
            f"look at CUDA_VISIBLE_DEVICES there"
        )
    devices = list_devices(device, num_devices)
    names = sorted({torch.cuda.get_device_name(one) for one in devices})
    if len(names) > 1:
        raise ConfigError(
            f"resources.gpu: {num_devices}, and these are of several kinds: {', '.join(names)}. "
            f"Each rounds in its own way, and a resumed trial may find them in another order: a "
            f"replayed step would not release the same again. Give 1, or nodes with one kind"
        )
    for one in devices:
        # also when the share is 1: an earlier trial may have left this process a smaller one
        torch.cuda.set_per_process_memory_fraction(gpu_share, one)
    torch.backends.cudnn.deterministic = True  # a replayed step must release the same again
    return device


def list_devices(first: torch.device, num: int) -> list[torch.device]:
    """List the devices of a trial: GPUs from the first on, or a CPU as often, a thread each."""
    if first.type == "cpu":
        return [first] * num
    return [torch.device(first.type, first.index + i) for i in range(num)]


def use_ieee_float32() -> None:
    """Turn TF32 and bfloat16 multiplication of float32 off, on GPUs and CPUs, and check it.

    Ten bits of mantissa are too few for the bound on a clipped sum (docs/concepts/privacy.md).

    Raises:
        ConfigError: If a backend still multiplies otherwise.
    """
    for _, backend in _PRECISIONS:
        backend.fp32_precision = "ieee"
    rounded = {name: b.fp32_precision for name, b in _PRECISIONS if b.fp32_precision != "ieee"}
    if rounded:
        shown = ", ".join(f"torch.backends.{k}.fp32_precision is {v}" for k, v in rounded.items())
        raise ConfigError(
            f"{shown} after it was set to ieee: clipped sums would be too coarse for their bound. "
            f"Use a torch build that takes the setting"
        )


@contextmanager
def use_torch_defaults() -> Iterator[None]:
    """Compute within this context as a script that imports torch alone would.

    What we are compared with (benchmarks/step.py) is timed under torch's settings, not ours.
    """
    ours = [backend.fp32_precision for _, backend in _PRECISIONS]
    deterministic, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, False
    for (_, backend), precision in zip(_PRECISIONS, _AT_IMPORT, strict=True):
        backend.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = deterministic
        for (_, backend), precision in zip(_PRECISIONS, ours, strict=True):
            backend.fp32_precision = precision
