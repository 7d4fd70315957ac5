"""Answers by Opacus' hooks: its own per-example gradients, clipped and summed by ours.

Kept to compare with. What Opacus' layers compute is taken at each point of the query and
combined; its optimizer, accountant and noise are not used.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.func import vmap

from dpsweep.core.types import Clipped, PerExample, Tensors
from dpsweep.privacy.clip import Clip, add, clipped_sum
from dpsweep.privacy.engine.base import Loss, Portion, portions


@dataclass(frozen=True)
class OpacusEngine:
    """Answers of models whose layers Opacus knows.

    Attributes:
        model: Copied; its own tensors are not read.
        loss: Loss of one example.
        max_physical_batch: Examples whose gradients are in memory at once.
    """

    model: nn.Module
    loss: Loss
    max_physical_batch: int

    def clipped_sum(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Tensor,
        targets_B: Tensor,
        clip: Clip,
    ) -> Clipped:
        """Sum over the batch of each example's clipped answer; zeros for an empty batch."""
        nobody = {k: p.new_zeros((0, *p.shape)).double() for k, p in points[0].items()}
        total = clipped_sum(PerExample(nobody), clip)
        for portion in portions(inputs_B, targets_B, self.max_physical_batch):
            answer: Tensors = {}
            for point, weight in zip(points, weights, strict=True):
                for key, leaf_B in self._gradients(point, portion).items():
                    part = weight * leaf_B
                    answer[key] = answer[key] + part if key in answer else part
            total = add(total, clipped_sum(PerExample(answer), clip, portion.present_B))
        return total

    def _gradients(self, point: Tensors, portion: Portion) -> Tensors:
        own = dict(self._hooked._module.named_parameters())
        with torch.no_grad():
            for key, p in own.items():
                p.copy_(point[key])
                p.grad = p.grad_sample = None
        outputs = self._hooked(portion.inputs_B)
        losses_B = vmap(lambda o, y: self.loss(o[None], y[None]))(outputs, portion.targets_B)
        torch.autograd.backward(losses_B.sum())
        num = len(portion.present_B)
        return {
            key: p.new_zeros(num, *p.shape) if p.grad_sample is None else p.grad_sample.detach()
            for key, p in own.items()
        }

    @cached_property
    def _hooked(self) -> GradSampleModule:
        return GradSampleModule(copy.deepcopy(self.model), loss_reduction="sum")
