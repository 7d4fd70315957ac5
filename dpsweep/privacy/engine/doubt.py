"""Whether records tell the truth about a model: compared with vmap, on two random images.

A layer that changes its input in place, is handed a tensor without examples, or whose weights are
also used elsewhere, would be recorded wrongly. No list of layers is complete, so each model is
tried before the first step.
"""

import torch
from torch import nn

from dpsweep.core.seeds import public_seed
from dpsweep.privacy.clip import Automatic
from dpsweep.privacy.engine.base import Loss
from dpsweep.privacy.engine.bookkeeping import BookkeepingEngine
from dpsweep.privacy.engine.vmap import VmapEngine

_TOLERANCE = 1e-3
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
_answered: dict[str, str | None] = {}


def doubt(model: nn.Module, loss: Loss, input_shape: tuple[int, ...]) -> str | None:
    """Why book-keeping cannot be used with `model`; None if it can.

    Asked once for each kind of model in a process. Nothing private is touched.

    Raises:
        RuntimeError: If vmap cannot run the model either.
    """
    first = next(model.parameters())
    kind = f"{model!r} {input_shape} {first.dtype} {first.device}"
    if kind not in _answered:
        _answered[kind] = _compared(model, loss, input_shape, first)
    return _answered[kind]


def _compared(
    model: nn.Module, loss: Loss, input_shape: tuple[int, ...], like: torch.Tensor
) -> str | None:
    rng = torch.Generator().manual_seed(public_seed(0, "doubt"))
    inputs = torch.randn(2, *input_shape, generator=rng).to(like)
    targets = torch.zeros(2, dtype=torch.int64, device=like.device)
    params = {k: p.detach() for k, p in model.named_parameters()}
    question = ([params], [1.0], inputs, targets, Automatic(1.0))
    theirs = VmapEngine(model, loss, 2).clipped_sum(*question)
    try:
        ours = BookkeepingEngine(model, loss, 2).clipped_sum(*question)
    except _FAILURES as e:
        return f"{type(e).__name__}: {e}"
    for key, expected in theirs.items():
        error = (ours[key] - expected).norm()
        if not error <= _TOLERANCE * (expected.norm() + 1e-3):
            return f"the gradient of {key!r} is not what was recorded"
    return None
