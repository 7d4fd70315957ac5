"""Answers by Opacus' hooks: its own per-example gradients, clipped and summed by ours.

Kept to compare with. What Opacus' layers compute is taken at each point of the query and
combined; its optimizer, accountant and noise are not used.
"""

import copy
from collections.abc import Sequence
from functools import cached_property

import torch
from opacus.grad_sample import GradSampleModule

from dpsweep.core.types import Clipped, PerExample, Tensors
from dpsweep.privacy.clip import Clip, clipped_sum
from dpsweep.privacy.engine.base import ByPortions, Portion, each_loss


class OpacusEngine(ByPortions):
    """Answers of models whose layers Opacus knows; it works on a copy of the model."""

    def _portion(
        self, points: Sequence[Tensors], weights: Sequence[float], portion: Portion, clip: Clip
    ) -> Clipped:
        answer: Tensors = {}
        for point, weight in zip(points, weights, strict=True):
            for key, leaf_B in self._gradients(point, portion).items():
                part = weight * leaf_B
                answer[key] = answer[key] + part if key in answer else part
        return clipped_sum(PerExample(answer), clip, portion.present_B)

    def _gradients(self, point: Tensors, portion: Portion) -> Tensors:
        own = dict(self._hooked._module.named_parameters())
        with torch.no_grad():
            for key, p in own.items():
                p.copy_(point[key])
                p.grad = p.grad_sample = None
        outputs = self._hooked(portion.inputs_B)
        losses_B = each_loss(self.loss, outputs, portion.targets_B)
        torch.autograd.backward(losses_B.sum())
        num = len(portion.present_B)
        return {
            key: p.new_zeros(num, *p.shape) if p.grad_sample is None else p.grad_sample.detach()
            for key, p in own.items()
        }

    @cached_property
    def _hooked(self) -> GradSampleModule:
        return GradSampleModule(copy.deepcopy(self.model), loss_reduction="sum")
