"""Engines: ways to get the clipped sum of a query's answers. All give the same sum."""

from torch import nn

from dpsweep.privacy.engine.base import Engine, Loss
from dpsweep.privacy.engine.records import RecordsEngine
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.privacy.geometry import Geometry

__all__ = ["Engine", "RecordsEngine", "VmapEngine", "engine_for", "refuse_mixing"]


def engine_for(model: nn.Module, loss: Loss, geometry: Geometry, max_physical_batch: int) -> Engine:
    """The engine that can answer in `geometry`.

    Raises:
        ValueError: If the model mixes examples.
    """
    refuse_mixing(model)
    if geometry.maps:
        return RecordsEngine(model, loss, max_physical_batch, geometry)
    return VmapEngine(model, loss, max_physical_batch)


def refuse_mixing(model: nn.Module) -> None:
    """Raises ValueError if a layer lets one example's answer depend on the others'."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__}, which mixes examples: clipping one "
                f"answer would not bound what one example does. Use GroupNorm"
            )
