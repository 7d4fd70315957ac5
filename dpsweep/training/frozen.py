"""The frozen part of a model, computed once for all examples instead of at every step.

Only where every image is the same at every step (no augmentation), where the engine has been tried
on the whole model, so that no example's output depends on another in the frozen part either, and
where gradients are plain. What is released is the same, up to rounding.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dpsweep.config.trial import TrialConfig
from dpsweep.core.inputs import Inputs, count_rows, pad_rows, take_rows
from dpsweep.core.progress import ProgressLines
from dpsweep.data.read import Dataset, load_shared_features
from dpsweep.data.text import GenerationData
from dpsweep.models.frozen import Cut, find_cut
from dpsweep.models.huggingface import HuggingFace
from dpsweep.models.own import Own
from dpsweep.models.text import TextModel
from dpsweep.models.text_cut import find_text_cut
from dpsweep.privacy.engine import BookkeepingEngine
from dpsweep.privacy.engine.alignment import aligned, find_unaligned
from dpsweep.privacy.engine.state_guard import StateGuard
from dpsweep.training.step import Step

_CHUNK, _TRIMMED = 256, 48
"""Rows of every call, and where padding is cut off, as each length has a remainder to fill.
Multiples of four, as in engine/size.py, so that each is computed alike at any place."""

_LENGTHS = 8
"""Lengths are rounded up to multiples of it, where padding is cut off."""

_MOST_BYTES = 2**32
"""Most bytes that are kept; above, the frozen part is computed at every step."""


def find_step_cut(step: Step) -> Cut | None:
    """Find the cut of the model of `step` behind its frozen part; None if all is trained."""
    config, first = step.config, step.engine.replicas[0]
    suits = config.model.freezes and config.train.augment is None and config.data.copies == 1
    if isinstance(config.data, GenerationData) and config.data.task.generates:
        return None  # texts are written by the whole model
    if not suits or step.geometry.maps or not isinstance(first, BookkeepingEngine):
        return None
    model, spec = step.engine.model, step.data.spec
    adapted = find_text_cut(model, spec) if isinstance(model, TextModel) else None
    found = adapted or find_cut(model, spec)
    num = config.data.num_examples + len(step.data.valid_targets)
    if found is None or num * math.prod(found.shape) * step.dtype.itemsize > _MOST_BYTES:
        return None
    return found


def compute_frozen_outputs(found: Cut, step: Step) -> Dataset:
    """Compute the frozen part's outputs for all data; kept on this node for the next trial.

    With a model or data of the user's own code it is computed for each trial, as that may change.
    """
    config, data = step.config, step.data

    def make() -> tuple[Tensor, Tensor]:
        return _compute_outputs(found, data, data.inputs, step), _compute_outputs(
            found, data, data.valid_inputs, step
        )

    if isinstance(config.model, Own) or not config.data.is_kept:
        inputs, valid = make()
    else:
        inputs, valid = load_shared_features(
            config.data, config.seed, _fingerprint_frozen(found, config), make
        )
    made_of = replace(data, inputs=inputs, valid_inputs=valid, are_features=True, fields=None)
    return made_of.to(data.device)


def _compute_outputs(found: Cut, data: Dataset, inputs: Inputs, step: Step) -> Tensor:
    guard, model = StateGuard(found.model, with_parameters=True), step.config.model
    made = torch.empty(count_rows(inputs), *found.shape, dtype=step.dtype)
    lines = ProgressLines(f"model: frozen part of {model.name}", len(made), "examples")
    trims = isinstance(inputs, dict) and isinstance(model, HuggingFace)
    size = _TRIMMED if trims else _CHUNK
    unaligned = find_unaligned(found.model)
    for rows, some in trimmed_chunks(inputs, data) if trims else _chunks(inputs, size):
        num = count_rows(some)
        # Kernels are chosen by the number of rows (of fewer than four, those for vectors), and an
        # example's last bits would otherwise depend on how many others there are.
        filled = pad_rows(some, size - num)
        with aligned(unaligned):
            made[rows] = found.features(data.scaled(filled, step.dtype))[:num].cpu()
        lines.advance(num)
    guard.check()
    return made


def _chunks(inputs: Inputs, size: int) -> Iterator[tuple[slice | Tensor, Inputs]]:
    for first in range(0, count_rows(inputs), size):
        rows = slice(first, first + size)
        yield rows, take_rows(inputs, rows)


def trimmed_chunks(inputs: Inputs, data: Dataset) -> Iterator[tuple[slice | Tensor, Inputs]]:
    """Yield examples of about one length together, without the padding that all of them have.

    For models that ignore padding, as check_agreement shows of each (models/text.py). Each
    example's own length decides what is cut off, so no example depends on another.
    """
    masks = [field.name for field in data.fields or () if field.is_mask]
    if not masks or not isinstance(inputs, dict):
        yield from _chunks(inputs, _TRIMMED)
        return
    length = inputs[masks[0]].shape[1]
    cut_B = (-(-inputs[masks[0]].long().sum(1) // _LENGTHS) * _LENGTHS).clamp(_LENGTHS, length)
    for cut in sorted(set(cut_B.tolist())):
        for rows in (cut_B == cut).nonzero().flatten().split(_TRIMMED):
            yield rows, {k: x[rows, :cut] for k, x in inputs.items()}


def _fingerprint_frozen(found: Cut, config: TrialConfig) -> str:
    """Hash the architecture and every frozen number; of an adapter, where it begins alone.

    Trials with another rank, or another scale, then share what crosses.
    """
    model = config.model.model_dump_json(exclude={"adapter"})
    digest = hashlib.sha256(f"{model} {found.shape} {config.train.dtype}".encode())
    for name, x in found.model.named_buffers():
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
