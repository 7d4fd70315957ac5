"""How many examples to compute at once, from what one of them keeps in memory."""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsweep.privacy.engine.layers import written

_CPU_BYTES = 192 * 2**20
"""Between the cost of starting many small kernels and that of leaving the caches."""

_CPU_EXAMPLES = 256
"""More make no step faster, and float32 sums over many examples less precise."""

_CUDA_SHARE = 0.4
"""Of the card's memory; the rest is for what libraries and the allocator set aside."""

_COPIES = {"bookkeeping": 1, "vmap": 3, "opacus": 3}
"""Copies of a per-example gradient that an engine holds at once."""


def fitting_batch(
    model: nn.Module,
    input_shape: tuple[int, ...],
    batch_size: int,
    engine: str,
    device: torch.device,
    copies: int = 1,
    share: float = 1.0,
) -> int:
    """Examples to compute at once: the expected batch in a few even parts that fit in memory.

    A function of the model and the machine's total memory, not of what is free, so that a trial
    that is resumed sums in the same order. The parts have room for a Poisson batch two standard
    deviations above its mean.

    Args:
        model: The model.
        input_shape: Of one example.
        batch_size: Expected size of a batch.
        engine: Name of the engine.
        device: Where the batch is computed.
        copies: Of each example.
        share: Of a GPU's memory that is this process's.
    """
    each = bytes_per_example(model, input_shape, engine, copies)
    if device.type == "cuda":
        fits = share * _CUDA_SHARE * torch.cuda.get_device_properties(device).total_memory / each
    else:
        fits = min(_CPU_BYTES / each, _CPU_EXAMPLES / copies)
    parts = max(1, round(batch_size / max(fits, 1.0)))
    return math.ceil((batch_size + 2 * math.sqrt(batch_size)) / parts)


def bytes_per_example(
    model: nn.Module, input_shape: tuple[int, ...], engine: str, copies: int = 1
) -> int:
    """What one example takes: activations, their gradients, its own gradient if written out.

    Measured by passes over black images, in which autograd notes what it keeps. What one image
    more adds is an example's own; the rest, such as spectra of the weights, is kept once.
    """
    kept = _kept(model, input_shape, 3) - _kept(model, input_shape, 2)
    own = written(model) if engine == "bookkeeping" else list(model.parameters())
    gradients = _COPIES[engine] * sum(p.nbytes for p in own)
    if engine == "opacus":  # it writes out one for each copy
        gradients *= copies
    return 2 * copies * kept + gradients


def _kept(model: nn.Module, input_shape: tuple[int, ...], num_examples: int) -> int:
    """Bytes that a pass keeps for its way back, and those of the outputs."""
    weights = {k: p.detach().requires_grad_() for k, p in model.named_parameters()}
    state = weights | {k: x.clone() for k, x in model.named_buffers()}
    kept: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x
        return x

    first = next(iter(weights.values()))
    inputs = torch.zeros((num_examples, *input_shape), device=first.device, dtype=first.dtype)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outputs = functional_call(model, state, (inputs,))
    for p in state.values():
        kept.pop(p.untyped_storage()._cdata, None)
    return int(sum(x.untyped_storage().nbytes() for x in kept.values()) + outputs.nbytes)
