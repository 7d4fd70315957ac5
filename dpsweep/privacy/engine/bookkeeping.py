"""Per-example gradients from records of one forward and one backward pass a point.

Each layer's input a and the gradient b of its output are noted at every point p_m (records.py), and
for every copy of an example, which to the rules below is a point like any other. The gradient
sum_m w_m b_m a_m^T of a linear layer is that of one layer fed the points side by side, so its norm
and its clipped sum come from the same records, in the cheaper of two forms (layers.py, conv.py).
Layers with a geometry of their own (privacy/geometry.py) take the records too; any other layer is a
black box, computed by vmap alone.

Norms from Gram matrices are summed in double precision and never come out too small.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from dpsweep.core.inputs import map_inputs
from dpsweep.core.types import Clipped, Precision, Tensors
from dpsweep.privacy.clip import SUMMED, Clip, add_clipped, compute_factors, stack_squares
from dpsweep.privacy.engine.alignment import find_unaligned
from dpsweep.privacy.engine.base import Microbatch, MicrobatchEngine
from dpsweep.privacy.engine.circulant import CirculantGradients
from dpsweep.privacy.engine.conv import GhostNormKernels
from dpsweep.privacy.engine.gradients import (
    NOTHING,
    Known,
    OuterProducts,
    ParameterGradients,
    Rows,
    TiedRows,
    WrittenOut,
    add_shared,
    any_nonzero,
    find_cancelling,
    sum_that_may_cancel,
)
from dpsweep.privacy.engine.layers import Site, find_sites, merge_calls
from dpsweep.privacy.engine.records import LayerCall, record_calls
from dpsweep.privacy.geometry import IDENTITY, Geometry
from dpsweep.privacy.spectral import LayerMap, Records

_LARGEST = 1e15
"""Largest number allowed in a record: products of two, and sums of many, are finite in float32."""


@dataclass(frozen=True)
class BookkeepingEngine(MicrobatchEngine):
    """Engine for models whose layers hand on one tensor with the examples first.

    Attributes:
        precision: Of forward and backward passes, whose records are summed in the parameters';
            that of the parameters if None.
        geometry: Which parameters' gradients are in whitened coordinates.
    """

    geometry: Geometry = field(default=IDENTITY)
    precision: Precision | None = field(default=None, kw_only=True)

    def collect_contributions(
        self, params: Tensors, portion: Microbatch
    ) -> dict[str, list[Tensor]]:
        """Layer name -> the tensors in the records of its calls at `params`, shape (B, ...)."""
        found = self._recorded(params, 1.0, portion)  # who contributes does not depend on a weight
        return {
            name: [x for call in calls for x in (call.grad, *call.inputs) if isinstance(x, Tensor)]
            for name, calls in found.items()
        }

    def _recorded(
        self, params: Tensors, weight: float, portion: Microbatch
    ) -> dict[str, list[LayerCall]]:
        model, layers, loss, rows = self.model, self._layers, self.loss, self._unaligned
        return record_calls(model, layers, loss, params, weight, portion, rows, self.precision)

    @cached_property
    def _unaligned(self) -> list[nn.Linear]:
        return find_unaligned(self.model)

    def _laid_out(self, leaf: Tensor) -> Tensor:
        """Images and kernels with their channels last, which most convolutions are faster on."""
        images = leaf.dim() == 4 and self._convolves
        return leaf.contiguous(memory_format=torch.channels_last) if images else leaf

    @cached_property
    def _convolves(self) -> bool:
        return any(isinstance(module, nn.Conv2d) for module in self.model.modules())

    def _shape(self, key: str, param: Tensor) -> tuple[int, ...]:
        maps = self.geometry.maps
        return maps[key].white_shape if key in maps else tuple(param.shape)

    def _portion(
        self, points: Sequence[Tensors], weights: Sequence[float], portion: Microbatch, clip: Clip
    ) -> Clipped:
        calls_by_layer: dict[str, list[LayerCall]] = {}
        asked = portion.flatten_copies(self.copies)
        asked = asked._replace(inputs_B=map_inputs(self._laid_out, asked.inputs_B))
        seen = [
            self._recorded(point, weight, asked)
            for point, weight in zip(points, weights, strict=True)
        ]
        for found in seen:
            for name, calls in found.items():
                for call in calls:
                    # only now: a later layer may have written to the tensor that was noted
                    call.check_unchanged(name)
                    calls_by_layer.setdefault(name, []).extend(call.split_copies(self.copies))
        present_B = portion.present_B
        # on a GPU a kernel more costs more than memory: there each gradient sums in slices itself
        if len(present_B) <= SUMMED or present_B.is_cuda:
            return self._sum_clipped(calls_by_layer, points[0], present_B, clip)
        total = self.empty_sum(points[0], clip)
        for start in range(0, len(present_B), SUMMED):
            rows = slice(start, start + SUMMED)
            some = {
                name: [call.only(rows) for call in calls] for name, calls in calls_by_layer.items()
            }
            total = add_clipped(total, self._sum_clipped(some, points[0], present_B[rows], clip))
        return total

    def _sum_clipped(
        self,
        calls_by_layer: Mapping[str, Sequence[LayerCall]],
        params: Tensors,
        present_B: Tensor,
        clip: Clip,
    ) -> Clipped:
        """The clipped sum; on a CPU over so few that their own precision will do."""
        gradients = self._make_gradients(calls_by_layer, params, len(present_B))
        squares = {k: gradient.squares() for k, gradient in gradients.items()}
        stacked = stack_squares(squares)
        factors, count = compute_factors(squares, clip, present_B, stacked)
        known = _find_needed_checks(gradients, stacked[1], factors)
        total = {k: gradient.sum_scaled(factors[k], known[k]) for k, gradient in gradients.items()}
        return Clipped(total | count)

    def _make_gradients(
        self, calls_by_layer: Mapping[str, Sequence[LayerCall]], params: Tensors, num: int
    ) -> dict[str, ParameterGradients]:
        """Parameter name -> its gradients, in the model's order; nothing, if it was not called."""
        maps = self.geometry.maps
        parts: dict[str, list[ParameterGradients]] = {key: [] for key in params}
        for name, site in self._sites.items():
            calls = calls_by_layer.get(name)
            if not calls:
                continue
            plain = {key: own for key, own in site.params.items() if key not in maps}
            found = {}
            if plain:
                # not for maps, whose bound on what rounding hides needs each point by itself
                once = merge_calls(site, calls)
                found = site.rule(site.layer, once, frozenset(plain.values()))
            for key, own in site.params.items():
                if key in maps:
                    parts[key].append(MappedGradients(maps[key], _collect_records(calls)))
                elif own in found:
                    parts[key].append(found[own])
        for key, some in parts.items():
            if not some:  # never called: its gradient is 0, and it gets its noise like the others
                shape = (num, *params[key].shape)
                some.append(WrittenOut(params[key].new_zeros(()).expand(shape)))
        return {key: add_shared(some) for key, some in parts.items()}

    @cached_property
    def _sites(self) -> dict[str, Site]:
        return find_sites(self.model)

    @cached_property
    def _layers(self) -> dict[str, nn.Module]:
        return {site.called: site.layer for site in self._sites.values()}


@dataclass(frozen=True, eq=False)
class MappedGradients:
    """Gradients of a parameter with a geometry of its own."""

    map: LayerMap
    records: Records

    @cached_property
    def usable_B(self) -> Tensor:
        """False for an example with records so large that transforms of them may be infinite."""
        return self.records.peak_B <= _LARGEST  # false for NaN

    @property
    def may_cancel(self) -> bool:
        """True if terms may cancel; the terms of several points are summed in double."""
        return len(self.records.weights) == 1 and self.records.dtype != torch.float64

    def squares(self) -> Tensor:
        return self.norms[0]

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Squares, and the norm that there would be if nothing cancelled, shape (B,) each."""
        square_B = torch.where(self.usable_B, self.map.squares(self.records), math.inf)
        return square_B, self.records.longest_B

    def sum_scaled(self, factor_B: Tensor, known: Known = NOTHING) -> Tensor:
        # their factor is 0, but 0 times infinite is not
        unusable = not known.finite and any_nonzero(~self.usable_B)
        records = self.records.only(self.usable_B) if unusable else self.records

        def coordinates(rows: Rows, factor_B: Tensor, dtype: torch.dtype) -> Tensor:
            some = records if rows is None else records.rows(rows)
            some = some.double() if dtype != records.dtype else some
            if len(factor_B) <= SUMMED:
                return self.map.coordinates(some, factor_B)
            starts = range(0, len(factor_B), SUMMED)
            slices = [slice(start, start + SUMMED) for start in starts]
            parts = [self.map.coordinates(some.rows(s), factor_B[s]) for s in slices]
            return torch.stack(parts).sum(0, dtype=torch.float64)

        if not self.may_cancel:
            return coordinates(None, factor_B, records.dtype)
        return sum_that_may_cancel(coordinates, factor_B, self.norms, known, records.dtype)

    def each(self) -> Tensor:
        raise ValueError("a parameter that two layers share has no geometry of its own")


def _find_needed_checks(
    gradients: Mapping[str, ParameterGradients], usable_B: Tensor, factors: Tensors
) -> Mapping[str, Known]:
    """Find the checks that no sum needs, by one look at all examples.

    An example with a number that is not finite in any record has a norm that is not, unless no
    product reads that number, as those of pixels between a convolution's strides. Rows that only
    fill up are looked at too: they may repeat such an example. Whether terms cancel is asked here
    on a GPU alone, which would be waited for at each sum.
    """
    if not next(iter(factors.values())).is_cuda:
        return dict.fromkeys(gradients, Known(finite=bool(usable_B.all())))
    flags = [(~usable_B).any()[None]]
    kinds = OuterProducts | TiedRows | GhostNormKernels | CirculantGradients | MappedGradients
    split = {k: x for k, x in gradients.items() if isinstance(x, kinds) and x.may_cancel}
    if split:
        squares_LB = torch.stack([x.norms[0] for x in split.values()])
        longest_LB = torch.stack([x.norms[1] for x in split.values()])
        factors_LB = torch.stack([factors[k] for k in split])
        flags.append(find_cancelling(factors_LB, squares_LB, longest_LB).any(1))
    unusable, *cancelling = torch.cat(flags).tolist()
    quiet = {k: not one for k, one in zip(split, cancelling, strict=True)}
    return {k: Known(finite=not unusable, quiet=quiet.get(k, False)) for k in gradients}


def _collect_records(calls: Sequence[LayerCall]) -> Records:
    return Records(
        weights=tuple(call.weight for call in calls),
        inputs=tuple(call.inputs[0] for call in calls),
        grads=tuple(call.grad for call in calls),
    )
