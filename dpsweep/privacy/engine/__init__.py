"""Engines: ways to get the clipped sum of a query's answers. All give the same sum."""

import logging
from collections.abc import Sequence
from importlib import import_module

import torch
from torch import nn

from dpsweep.core.types import EngineName
from dpsweep.privacy.engine.base import Engine, Loss, row_counts
from dpsweep.privacy.engine.bookkeeping import BookkeepingEngine
from dpsweep.privacy.engine.crowd import mixing_in_crowds
from dpsweep.privacy.engine.doubt import Make, reason_to_doubt
from dpsweep.privacy.engine.layers import black_boxes
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.privacy.geometry import Geometry

__all__ = ["BookkeepingEngine", "Engine", "VmapEngine", "engine_for", "refuse_mixing"]

_log = logging.getLogger(__name__)
_said: set[str] = set()
_doubts: dict[tuple[object, ...], str | None] = {}
_crowds: dict[tuple[object, ...], tuple[int, str | None]] = {}
"""What was tried -> the largest batch it was tried with, and what was found."""


def engine_for(
    model: nn.Module,
    loss: Loss,
    geometry: Geometry,
    max_physical_batch: int,
    input_shape: tuple[int, ...],
    choice: EngineName = "auto",
    kind: str | None = None,
    copies: int = 1,
) -> Engine:
    """The engine of that name; auto is book-keeping, unless the model cannot be recorded.

    Args:
        model: The model.
        loss: Loss of one example.
        geometry: In which answers are clipped.
        max_physical_batch: Examples to compute at once.
        input_shape: Of one example.
        choice: Which engine.
        kind: What tells this model apart from all others, such as its config: then the question
            whether an engine is right about it is asked once in a process, and not each time.
        copies: In which each example comes; its answer is the mean over them, clipped once.

    Raises:
        ValueError: If the engine cannot answer for this model in this geometry.
    """
    refuse_mixing(model)
    refuse_geometry(choice, geometry)
    first = next(model.parameters())
    if first.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"its weights are {first.dtype}, too coarse for a bound on a sum")
    if choice == "vmap":
        return VmapEngine(model, loss, max_physical_batch, copies=copies)
    sizes = [copies * num for num in row_counts(max_physical_batch)]
    if choice == "opacus":  # its package takes half a second to import, and few need it
        opacus = import_module("dpsweep.privacy.engine.opacus")
        reason = opacus.overlooked(model) or _doubt(
            model, loss, input_shape, kind, opacus.OpacusEngine, sizes
        )
        if reason:
            raise ValueError(f"Opacus does not answer rightly for it: {reason}. Use auto")
        engine: Engine = opacus.OpacusEngine(model, loss, max_physical_batch, copies=copies)
        return engine
    reason = _doubt(model, loss, input_shape, kind, BookkeepingEngine, sizes)
    if reason is None:
        if boxes := black_boxes(model):
            _say(f"computed by vmap, being unknown to book-keeping: {', '.join(boxes)}")
        return BookkeepingEngine(model, loss, max_physical_batch, geometry, copies=copies)
    if choice == "bookkeeping" or geometry.maps:
        raise ValueError(f"its layers cannot be recorded one by one ({reason})")
    _say(f"{type(model).__name__} is computed by vmap as a whole, which is slower ({reason})")
    return VmapEngine(model, loss, max_physical_batch, copies=copies)


def unchecked_engine(
    model: nn.Module,
    loss: Loss,
    geometry: Geometry,
    max_physical_batch: int,
    choice: EngineName = "auto",
    copies: int = 1,
) -> Engine:
    """The engine that `engine_for` tries first, not tried yet: to measure its memory, no more."""
    if choice == "vmap":
        return VmapEngine(model, loss, max_physical_batch, copies=copies)
    if choice == "opacus":
        opacus = import_module("dpsweep.privacy.engine.opacus")
        engine: Engine = opacus.OpacusEngine(model, loss, max_physical_batch, copies=copies)
        return engine
    return BookkeepingEngine(model, loss, max_physical_batch, geometry, copies=copies)


def refuse_geometry(choice: EngineName, geometry: Geometry) -> None:
    """Raises ValueError if an engine that is asked for cannot answer in `geometry`."""
    if geometry.maps and choice not in ("auto", "bookkeeping"):
        raise ValueError(
            f"engine {choice} answers with plain gradients, and this method's are spectral. "
            f"Use auto"
        )


def refuse_mixing(model: nn.Module) -> None:
    """Raises ValueError if a layer lets one example's answer depend on the others', or on luck."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__}, which mixes examples: clipping one "
                f"answer would not bound what one example does. Use GroupNorm"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) rescales the rows that examples use, in "
                f"place and past clipping and noise. Leave max_norm out"
            )
        dropout = getattr(layer, "dropout", layer.p if isinstance(layer, _DROPOUTS) else 0)
        if isinstance(dropout, float) and dropout > 0:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) drops at random, with draws that no seed "
                f"of a trial governs: a step could not be replayed. Set its probability to 0"
            )


def _doubt(
    model: nn.Module,
    loss: Loss,
    input_shape: tuple[int, ...],
    kind: str | None,
    make: Make,
    sizes: Sequence[int],
) -> str | None:
    """See doubt.py and crowd.py; a known kind is tried once in a process, and as `sizes` grow."""
    first = next(model.parameters())
    tried = (kind, input_shape, first.dtype, first.device)
    if kind is None or (make, *tried) not in _doubts:
        _doubts[make, *tried] = reason_to_doubt(model, loss, input_shape, make)
    if reason := _doubts[make, *tried]:
        return reason
    largest, found = _crowds.get(tried, (0, None))
    if kind is None or (found is None and max(sizes) > largest):
        found = mixing_in_crowds(model, input_shape, sizes)
        _crowds[tried] = max(sizes), found
    return found


_DROPOUTS = nn.modules.dropout._DropoutNd


def _say(what: str) -> None:
    """Once in a process."""
    if what not in _said:
        _said.add(what)
        _log.warning("%s", what)
