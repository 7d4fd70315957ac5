"""Engines: ways to get the clipped sum of a query's answers. All give the same sum."""

from torch import nn

from dpsweep.privacy.engine.base import Engine, Loss
from dpsweep.privacy.engine.records import RecordsEngine
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.privacy.geometry import Geometry

__all__ = ["Engine", "RecordsEngine", "VmapEngine", "engine_for"]


def engine_for(model: nn.Module, loss: Loss, geometry: Geometry, max_physical_batch: int) -> Engine:
    """The engine that can answer in `geometry`."""
    if geometry.maps:
        return RecordsEngine(model, loss, max_physical_batch, geometry)
    return VmapEngine(model, loss, max_physical_batch)
