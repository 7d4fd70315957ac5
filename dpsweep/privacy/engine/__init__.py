"""Engines: ways to get the clipped sum of per-example gradients. All give the same sum."""

import logging
from importlib import import_module

import torch
from torch import nn

from dpsweep.core.types import EngineName, InputSpec, Precision
from dpsweep.privacy.engine.base import DrawTargets, Engine, Loss, draw_classes
from dpsweep.privacy.engine.bookkeeping import BookkeepingEngine
from dpsweep.privacy.engine.gradient_check import EngineFactory, find_wrong_gradients
from dpsweep.privacy.engine.layers import find_black_boxes
from dpsweep.privacy.engine.mixing_check import (
    find_mixing_sizes,
    find_moved_records,
    find_place_dependence,
)
from dpsweep.privacy.engine.parallel import join_engines, replicate_engine
from dpsweep.privacy.engine.precision import refuse_own_precision
from dpsweep.privacy.engine.state_guard import check_stateless, warm_up
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.privacy.geometry import Geometry

__all__ = [
    "BookkeepingEngine",
    "Engine",
    "VmapEngine",
    "join_engines",
    "make_engine",
    "refuse_unsupported_layers",
    "replicate_engine",
]

_log = logging.getLogger(__name__)
_logged: set[str] = set()
_stateless: set[tuple[object, ...]] = set()
_wrong: dict[tuple[object, ...], str | None] = {}
_mixing: dict[tuple[object, ...], tuple[int, str | None]] = {}
"""Results of checks in this process, by kind of model: those without state; the error of an
engine's gradients; the largest batch that was tried for mixing, and the finding."""


def make_engine(
    model: nn.Module,
    loss: Loss,
    geometry: Geometry,
    max_physical_batch: int,
    spec: InputSpec,
    choice: EngineName = "auto",
    kind: str | None = None,
    copies: int = 1,
    draw_targets: DrawTargets = draw_classes,
    precision: Precision | None = None,
) -> Engine:
    """The engine of that name; auto is book-keeping, unless the model cannot be recorded.

    Args:
        model: The model.
        loss: Loss of one example.
        geometry: The space in which gradients are clipped.
        max_physical_batch: Examples to compute at once.
        spec: Inputs of one example.
        choice: Which engine.
        kind: What tells this model and loss apart from all others, such as their config: then the
            question whether an engine is right about it is asked once in a process.
        copies: In which each example comes; its gradient is the mean over them, clipped once.
        draw_targets: Draws targets for the checks.
        precision: Of forward and backward passes; that of the weights if None.

    Raises:
        ConfigError: If the model remembers what it is called on, or draws at random: no engine is
            right about it, so none is fallen back to.
        ValueError: If the engine does not serve this model in this geometry, or examples mix.
    """
    refuse_unsupported_layers(model)
    refuse_geometry(choice, geometry)
    if precision and choice not in ("auto", "bookkeeping"):
        raise ValueError(f"engine {choice} keeps no records to sum in float32. Use auto")
    first = next(model.parameters())
    if first.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"its weights are {first.dtype}, too coarse for a bound on a sum")
    like = (kind, spec, first.dtype, first.device)
    if kind is None or like not in _stateless:
        check_stateless(model, spec)
        refuse_own_precision(model, spec)
        _stateless.add(like)
    warm_up(model, spec)  # each model has caches of its own

    def wrong(make: EngineFactory) -> str | None:
        if kind is None or (make, *like) not in _wrong:
            _wrong[make, *like] = find_wrong_gradients(model, loss, spec, make, draw_targets)
        return _wrong[make, *like]

    most = copies * max_physical_batch
    sizes = [-(-most // 4), most]  # an output that depends on the number of rows is wrong as well

    def mixing(make: EngineFactory | None = None) -> str | None:
        """Look at the outputs; with an engine, at its records."""
        largest, found = _mixing.get((make, *like), (0, None)) if kind else (0, None)
        if found is None and most > largest:
            if make is None:
                found = find_mixing_sizes(model, spec, sizes)
            elif layer := find_moved_records(model, loss, spec, sizes, make, draw_targets):
                found = (
                    f"examples mix, as layer {layer!r} shows, whose records of an example change "
                    f"with its place among {most} rows, or with the others there"
                )
            _mixing[make, *like] = most, found
        return found

    if choice == "opacus":  # its package takes half a second to import, and few need it
        module = import_module("dpsweep.privacy.engine.opacus")
        if (
            reason := module.find_unsupported_setting(model)
            or wrong(module.OpacusEngine)
            or mixing()
            or mixing(module.OpacusEngine)
        ):
            raise ValueError(f"Opacus does not answer rightly for it: {reason}. Use auto")
        engine: Engine = module.OpacusEngine(model, loss, max_physical_batch, copies=copies)
        return engine
    if choice != "vmap":
        reason, mixed = wrong(BookkeepingEngine), mixing()
        mixed = mixed or (None if reason else mixing(BookkeepingEngine))
        for text in (mixed, reason):
            # vmap could train it, one example at a time, but evaluation would still mix
            if text and text.startswith("examples mix"):
                raise ValueError(
                    f"{text}: one example's output depends on others in its batch. Make each "
                    f"output a function of one example, as with GroupNorm for BatchNorm, or write "
                    f"train.engine: vmap, which trains with one example at a time"
                )
        reason = reason or mixed
        if reason is None:
            if boxes := find_black_boxes(model):
                _log_once(f"computed by vmap, being unknown to book-keeping: {', '.join(boxes)}")
            found = BookkeepingEngine(
                model, loss, max_physical_batch, geometry, copies=copies, precision=precision
            )
            if precision and (layer := find_place_dependence(found, spec, most, draw_targets)):
                raise ValueError(
                    f"train.precision.forward: {precision} rounds what layer {layer!r} computes "
                    f"for an example otherwise at another place of its batch, so one example more "
                    f"would change the others' gradients. Delete train.precision"
                )
            return found
        if choice == "bookkeeping" or geometry.maps:
            raise ValueError(f"its layers cannot be recorded one by one ({reason})")
    if precision:
        raise ValueError(
            f"train.precision needs the book-keeping engine, which does not fit ({reason}). Delete "
            f"train.precision"
        )
    # vmap calls the model with one example at a time, so examples cannot mix, nor records be wrong
    if fault := wrong(VmapEngine):
        raise ValueError(f"vmap cannot compute it one example at a time ({fault})")
    if choice != "vmap":
        _log_once(
            f"{type(model).__name__} is computed by vmap as a whole, which is slower ({reason})"
        )
    return VmapEngine(model, loss, max_physical_batch, copies=copies)


def make_unchecked_engine(
    model: nn.Module,
    loss: Loss,
    geometry: Geometry,
    max_physical_batch: int,
    choice: EngineName = "auto",
    copies: int = 1,
    precision: Precision | None = None,
) -> Engine:
    """The engine that `make_engine` tries first, not tried yet: to measure its memory, no more."""
    if choice == "vmap":
        return VmapEngine(model, loss, max_physical_batch, copies=copies)
    if choice == "opacus":
        opacus = import_module("dpsweep.privacy.engine.opacus")
        engine: Engine = opacus.OpacusEngine(model, loss, max_physical_batch, copies=copies)
        return engine
    return BookkeepingEngine(
        model, loss, max_physical_batch, geometry, copies=copies, precision=precision
    )


def refuse_geometry(choice: EngineName, geometry: Geometry) -> None:
    """Raise ValueError if the chosen engine does not support `geometry`."""
    if geometry.maps and choice not in ("auto", "bookkeeping"):
        raise ValueError(
            f"engine {choice} computes plain gradients, and this method's are spectral. Use auto"
        )


def refuse_unsupported_layers(model: nn.Module) -> None:
    """Refuse layers that are known to mix examples, draw at random, or save more than tensors.

    Raises:
        ValueError: Naming the layer.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__}, which mixes examples: clipping one "
                f"gradient would not bound what one example does. Use GroupNorm"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) rescales the rows that examples use, in "
                f"place and past clipping and noise. Leave max_norm out"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) has sparse gradients, and noise is drawn "
                f"for every row: which rows the examples use is private. Leave sparse out"
            )
        if type(layer).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) has get_extra_state. Weights are saved "
                f"as parameters and buffers alone, since only those are noised or constant: what "
                f"else a layer keeps would be lost, or tell of the examples. Delete that method"
            )
        dropout = getattr(layer, "dropout", layer.p if isinstance(layer, _DROPOUTS) else 0)
        if isinstance(dropout, float) and dropout > 0:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) drops at random, with draws that no seed "
                f"of a trial governs: a step could not be replayed. Set its probability to 0"
            )


_DROPOUTS = nn.modules.dropout._DropoutNd


def _log_once(what: str) -> None:
    """Once in a process."""
    if what not in _logged:
        _logged.add(what)
        _log.warning("%s", what)
