"""Forward and backward passes in bf16 or TF32, for records that float32 clips and sums.

An example's gradient is defined by its records: u_i = sum_t b_t a_t^T. Rounded records define
another vector, which is clipped like any other: its norm and its sum come from the same records, in
IEEE float32, so an example adds at most the clip norm.

What one example does to the others' records must be nothing. A float32 kernel that rounds
otherwise at another place of a batch moves a record by 2^-23 of it; here it would be 2^-8 or
2^-10, for every example of the batch. So all portions have one size, and mixing_check.py looks
before the first step whether an example's records are the same bits wherever it stands.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpsweep.core.inputs import device_of
from dpsweep.core.types import InputSpec, Precision
from dpsweep.privacy.engine.calls import (
    call_model,
    draw_examples,
    isolate_generators,
    perturb_parameters,
)

_backends: Any = torch.backends  # whose stubs lack the submodules
_ROUNDED = (_backends.cuda.matmul, _backends.cudnn.conv, _backends.cudnn.rnn)


@contextmanager
def forward_in(precision: Precision | None, device: torch.device) -> Iterator[None]:
    """Compute products in this precision within the context; IEEE float32 if None."""
    if precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    else:
        with backward_in(precision):
            yield


@contextmanager
def backward_in(precision: Precision | None) -> Iterator[None]:
    """Compute the products of a backward pass as those of its forward pass were.

    bf16 needs nothing: autograd computes in the precision of what it recorded.
    """
    if precision != "tf32":
        yield
        return
    # settings of the process: no other thread may compute sums meanwhile, so a trial on several
    # devices is refused
    for backend in _ROUNDED:
        backend.fp32_precision = "tf32"
    try:
        yield
    finally:
        for backend in _ROUNDED:
            backend.fp32_precision = "ieee"


def widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of lower precision than `dtype`, in `dtype`; integers and others as they are."""
    return x.to(dtype) if x.is_floating_point() and x.itemsize < dtype.itemsize else x


_PRODUCTS = ("mm", "matmul", "linear", "conv", "attention", "einsum", "dot", "lstm", "gru", "rnn")
"""Parts of the names of torch's functions that sum products."""


class _Products(TorchFunctionMode):
    """The last sum of products that came out in fewer than 32 bits: (function, its type).

    A mode of torch's dispatcher would see more, and imports torch's compiler in every worker.
    """

    def __init__(self) -> None:
        self.found: tuple[str, torch.dtype] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if any(part in name for part in _PRODUCTS):
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, Tensor) and x.is_floating_point() and x.itemsize < 4:
                    self.found = name, x.dtype
        return result


def refuse_own_precision(model: nn.Module, spec: InputSpec) -> None:
    """Refuse a model whose forward pass itself multiplies in bf16 or float16.

    It would not be checked for rounding by place, as `train.precision` is, and records of bf16
    would be summed in it.

    Raises:
        ValueError: With the operation and the remedy.
    """
    model = copy.deepcopy(model)
    point = perturb_parameters(model, torch.Generator().manual_seed(0))
    inputs = draw_examples(model, 2, spec, 0)
    with isolate_generators(device_of(inputs)), _Products() as products:
        call_model(model, point, inputs)
    if products.found:
        name, dtype = products.found
        raise ValueError(
            f"its forward pass multiplies in {dtype} ({name}), and may round an example otherwise "
            f"at another place of its batch. Delete torch.autocast or the cast there, and write "
            f"train.precision: {{forward: bf16}}, which is checked for that"
        )


def refuse_precision(
    precision: Precision | None, device: torch.device, num_devices: int = 1
) -> None:
    """Refuse TF32 where it is not, or where one thread would switch it on under another.

    Raises:
        ValueError: With the reason.
    """
    if precision != "tf32":
        return
    if device.type != "cuda":
        raise ValueError("tf32 is a format of NVIDIA's GPUs, and this trial computes on a CPU")
    if num_devices > 1:
        raise ValueError(
            f"tf32 is switched on for a whole process, and threads for {num_devices} GPUs clip and "
            f"sum in it. Use bf16, or resources.gpu: 1"
        )
