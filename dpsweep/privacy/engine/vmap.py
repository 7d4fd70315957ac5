"""Per-example gradients by torch.func: any model, no hooks, one vmap over the combined loss.

Example i's gradient sum_m w_m grad f(p_m; xi_i) is the gradient at zero of

    h_i(offset) = sum_m w_m f(p_m + offset; xi_i)

so one reverse pass over h gives the whole weighted sum, and only one gradient per example
is ever held, however many points the query has.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpsweep.core.inputs import Inputs, apply_model, map_inputs
from dpsweep.core.types import Clipped, PerExample, Tensors
from dpsweep.privacy.clip import Clip, clipped_sum
from dpsweep.privacy.engine.base import Microbatch, MicrobatchEngine


class VmapEngine(MicrobatchEngine):
    """Engine that writes out gradients, a microbatch at a time."""

    def _portion(
        self, points: Sequence[Tensors], weights: Sequence[float], portion: Microbatch, clip: Clip
    ) -> Clipped:
        gradient = self._compute_per_example(points, weights, portion.inputs_B, portion.targets_B)
        return clipped_sum(gradient, clip, portion.present_B)

    def _compute_per_example(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Inputs,
        targets_B: Inputs,
    ) -> PerExample:
        def combined(offset: Tensors, x: Inputs, y: Inputs) -> Tensor:
            terms = [
                weight * self._loss_at({k: p + offset[k] for k, p in point.items()}, x, y)
                for point, weight in zip(points, weights, strict=True)
            ]
            return torch.stack(terms).sum()

        zero = {k: torch.zeros_like(p) for k, p in points[0].items()}
        gradients: Callable[..., Tensors] = vmap(grad(combined), in_dims=(None, 0, 0))
        return PerExample(gradients(zero, inputs_B, targets_B))

    def _loss_at(self, params: Tensors, x: Inputs, y: Inputs) -> Tensor:
        copies = x if self.copies > 1 else map_inputs(lambda leaf: leaf.unsqueeze(0), x)
        outputs = apply_model(self.model, copies, params)
        if not isinstance(y, dict):
            y = y.expand(self.copies, *y.shape)
        elif self.copies == 1:
            y = map_inputs(lambda leaf: leaf.unsqueeze(0), y)
        return self.loss(outputs, y)
