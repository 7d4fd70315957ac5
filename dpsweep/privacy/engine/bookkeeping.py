"""Answers from records: one forward and one backward pass a point, and no weight gradients.

Each layer's input a and the gradient b of its output are noted at every point p_m (tape.py), and
for every copy of an example, which to the rules below is a point like any other. A linear layer's
answer sum_m w_m b_m a_m^T is the gradient of one layer fed the points side by side, so its norm and
its clipped sum come from the same records, in the cheaper of two forms (layers.py, conv.py). Layers
with a geometry of their own (privacy/geometry.py) take the records too; any other layer is a black
box, computed by vmap alone.

Norms from Gram matrices are summed in double precision and never come out too small.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from dpsweep.core.types import Clipped, Tensors
from dpsweep.privacy.clip import SUMMED, Clip, add, scaling
from dpsweep.privacy.engine.answers import Answer, Each, added, split_by_cancellation
from dpsweep.privacy.engine.base import ByPortions, Portion
from dpsweep.privacy.engine.layers import Site, at_one_input, sites
from dpsweep.privacy.engine.tape import Use, record
from dpsweep.privacy.geometry import IDENTITY, Geometry
from dpsweep.privacy.spectral import LayerMap, Records

_LARGEST = 1e15
"""Of the numbers in a record; products of two of them, and sums of many, are finite in float32."""


@dataclass(frozen=True)
class BookkeepingEngine(ByPortions):
    """Answers of models whose layers hand on one tensor with the examples first.

    Attributes:
        geometry: Which parameters answer in white coordinates.
    """

    geometry: Geometry = field(default=IDENTITY)

    def seen(self, params: Tensors, portion: Portion) -> dict[str, list[Tensor]]:
        """Layer name -> the tensors in the records of its calls at `params`, shape (B, ...)."""
        found = record(self.model, self._layers, self.loss, params, 1.0, portion)
        return {
            name: [x for use in uses for x in (use.grad, *use.inputs) if isinstance(x, Tensor)]
            for name, uses in found.items()
        }

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
        self, points: Sequence[Tensors], weights: Sequence[float], portion: Portion, clip: Clip
    ) -> Clipped:
        uses: dict[str, list[Use]] = {}
        asked = portion.one_by_one(self.copies)
        asked = asked._replace(inputs_B=self._laid_out(asked.inputs_B))
        seen = [
            record(self.model, self._layers, self.loss, point, weight, asked)
            for point, weight in zip(points, weights, strict=True)
        ]
        for found in seen:
            for name, calls in found.items():
                for call in calls:
                    call.check_unchanged(name)
                    uses.setdefault(name, []).extend(call.parted(self.copies))
        if len(portion.present_B) <= SUMMED:
            return self._summed(uses, points[0], portion.present_B, clip)
        total = self._nobody(points[0], clip)
        for start in range(0, len(portion.present_B), SUMMED):
            rows = slice(start, start + SUMMED)
            some = {name: [call.only(rows) for call in calls] for name, calls in uses.items()}
            total = add(total, self._summed(some, points[0], portion.present_B[rows], clip))
        return total

    def _summed(
        self, uses: Mapping[str, Sequence[Use]], params: Tensors, present_B: Tensor, clip: Clip
    ) -> Clipped:
        """The clipped sum over so few that their own precision will do."""
        answers = self._answers(uses, params, len(present_B))
        squares = {k: answer.squares().double() for k, answer in answers.items()}
        factors, count = scaling(squares, clip, present_B)
        total = {k: answer.summed(factors[k]) for k, answer in answers.items()}
        return Clipped(total | count)

    def _answers(
        self, uses: Mapping[str, Sequence[Use]], params: Tensors, num: int
    ) -> dict[str, Answer]:
        """Parameter name -> its answer, in the model's order; nothing, if it was not called."""
        maps = self.geometry.maps
        parts: dict[str, list[Answer]] = {key: [] for key in params}
        for name, site in self._sites.items():
            calls = uses.get(name)
            if not calls:
                continue
            plain = {key: own for key, own in site.params.items() if key not in maps}
            found = {}
            if plain:
                once = at_one_input(site, calls)
                found = site.rule(site.layer, once, frozenset(plain.values()))
            for key, own in site.params.items():
                if key in maps:
                    parts[key].append(Mapped(maps[key], _records(calls)))
                elif own in found:
                    parts[key].append(found[own])
        for key, some in parts.items():
            if not some:
                shape = (num, *params[key].shape)
                some.append(Each(params[key].new_zeros(()).expand(shape)))
        return {key: added(some) for key, some in parts.items()}

    @cached_property
    def _sites(self) -> dict[str, Site]:
        return sites(self.model)

    @cached_property
    def _layers(self) -> dict[str, nn.Module]:
        return {site.called: site.layer for site in self._sites.values()}


@dataclass(frozen=True, eq=False)
class Mapped:
    """The answer of a parameter with a geometry of its own."""

    map: LayerMap
    records: Records

    @cached_property
    def usable_B(self) -> Tensor:
        """False for an example with records so large that transforms of them may be infinite."""
        return self.records.peak_B <= _LARGEST  # false for NaN

    def squares(self) -> Tensor:
        return self._squares_B

    @cached_property
    def _squares_B(self) -> Tensor:
        return torch.where(self.usable_B, self.map.squares(self.records), math.inf)

    def summed(self, factor_B: Tensor) -> Tensor:
        records, usable_B = self.records, self.usable_B
        if not usable_B.all():  # their factor is 0, but 0 times infinite is not
            records = records.only(usable_B)
        if len(records.weights) > 1 or records.dtype == torch.float64:  # summed in double
            return self.map.coordinates(records, factor_B)
        large_B, other_B = split_by_cancellation(factor_B, self._squares_B, records.longest_B)
        total = self.map.coordinates(records, other_B)
        rows = large_B.nonzero().flatten()
        if not len(rows):
            return total
        return total.double() + self.map.coordinates(records.of(rows).double(), large_B[rows])

    def each(self) -> Tensor:
        raise ValueError("a parameter that two layers share has no geometry of its own")


def _records(uses: Sequence[Use]) -> Records:
    return Records(
        weights=tuple(use.weight for use in uses),
        inputs=tuple(use.inputs[0] for use in uses),
        grads=tuple(use.grad for use in uses),
    )
