"""Calls of a model by the checks before the first step: on public inputs, at any point."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpsweep.core.device import describe_device_failure
from dpsweep.core.inputs import Inputs, apply_model, draw_inputs, list_tensors
from dpsweep.core.memory import find_exhausted_memory
from dpsweep.core.seeds import derive_public_seed
from dpsweep.core.types import InputSpec, Tensors

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
"""Errors of a model that cannot be computed in some way."""


def raise_if_memory_ran_out(error: Exception) -> None:
    """Re-raise `error` if it says nothing of the model, but of the memory or the GPU it ran on.

    The caller of the trial knows what to do about it.
    """
    if find_exhausted_memory(error) or describe_device_failure(error):
        raise error


def perturb_parameters(model: nn.Module, rng: torch.Generator) -> Tensors:
    """Draw parameters near the model's own, but not at zeros, which hide paths."""
    return {
        k: p.detach() + 0.02 * torch.randn(p.shape, generator=rng).to(p)
        for k, p in model.named_parameters()
    }


def draw_examples(model: nn.Module, num: int, spec: InputSpec, seed: int) -> Inputs:
    """Random inputs of the model's dtype and device, shape (num, ...)."""
    rng = torch.Generator().manual_seed(derive_public_seed(seed, "images for checks"))
    return draw_inputs(spec, num, rng, next(model.parameters()))


@contextmanager
def isolate_generators(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Leave torch's global generators as they are, whatever is drawn within this context.

    Args:
        device: Where it may be drawn.
        seed: Begin with this one.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def call_model(model: nn.Module, point: Tensors, inputs_B: Inputs, *, grad: bool = True) -> Tensor:
    """Compute outputs as a step does (`grad`), or as an evaluation does.

    Args:
        model: Called through `point`, whose entries it replaces if it assigns parameters.
        point: Parameters; leaves.
        inputs_B: Shape (B, ...).
        grad: Whether autograd records the call.

    Raises:
        ValueError: If the model cannot be called on such a batch.
    """
    for p in point.values():
        p.requires_grad_(grad)
    own = [(m._parameters, dict(m._parameters)) for m in model.modules()]
    with torch.set_grad_enabled(grad):
        try:
            outputs = apply_model(model, inputs_B, point)
        except FAILURES as e:
            raise_if_memory_ran_out(e)
            shapes = " and ".join(str(tuple(x.shape)) for x in list_tensors(inputs_B))
            raise ValueError(f"it does not take a batch of {shapes} ({e})") from e
        finally:
            for slots, before in own:
                slots.update(before)  # functional_call forgets to, in a module that has two names
    return outputs
