"""Opacus' hooks as an engine: its own per-example gradients, clipped and summed by ours.

Kept to compare with. What Opacus' layers compute is taken at each point of the query and
combined; its optimizer, accountant and noise are not used. Settings of layers that it overlooks
are refused by name, and what else it gets wrong is found by trying (gradient_check.py).
"""

import copy
from collections.abc import Sequence
from functools import cached_property

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from dpsweep.core.inputs import apply_model
from dpsweep.core.types import Clipped, PerExample, Tensors
from dpsweep.privacy.clip import Clip, clipped_sum, layer_of
from dpsweep.privacy.engine.alignment import aligned, find_unaligned
from dpsweep.privacy.engine.base import Microbatch, MicrobatchEngine, per_example_loss
from dpsweep.privacy.engine.state_guard import StateGuard


class OpacusEngine(MicrobatchEngine):
    """Engine for models whose layers Opacus knows; it works on a copy of the model."""

    def _portion(
        self, points: Sequence[Tensors], weights: Sequence[float], portion: Microbatch, clip: Clip
    ) -> Clipped:
        gradient: Tensors = {}
        num, copies = len(portion.present_B), self.copies
        for point, weight in zip(points, weights, strict=True):
            for key, leaf in self._gradients(point, portion.flatten_copies(copies)).items():
                leaf_B = leaf.view(copies, num, *leaf.shape[1:]).mean(0) if copies > 1 else leaf
                part = weight * leaf_B
                gradient[key] = gradient[key] + part if key in gradient else part
        return clipped_sum(PerExample(gradient), clip, portion.present_B)

    def collect_contributions(
        self, params: Tensors, portion: Microbatch
    ) -> dict[str, list[Tensor]]:
        """Layer name -> gradients of its parameters at `params`, shape (B, *param.shape) each."""
        found: dict[str, list[Tensor]] = {}
        for key, leaf_B in self._gradients(params, portion).items():
            found.setdefault(layer_of(key), []).append(leaf_B)
        return found

    def _gradients(self, point: Tensors, portion: Microbatch) -> Tensors:
        own = dict(self._hooked._module.named_parameters())
        with torch.no_grad():
            for key, p in own.items():
                p.copy_(point[key])
                p.grad = p.grad_sample = None
        with aligned(self._unaligned):
            outputs = apply_model(self._hooked, portion.inputs_B)
        losses_B = per_example_loss(self.loss, outputs, portion.targets_B)
        torch.autograd.backward(losses_B.sum())
        num = len(portion.present_B)
        return {
            key: p.new_zeros(num, *p.shape) if p.grad_sample is None else p.grad_sample.detach()
            for key, p in own.items()
        }

    @cached_property
    def _unaligned(self) -> list[nn.Linear]:
        return find_unaligned(self._hooked)

    @cached_property
    def _guard(self) -> StateGuard:
        copied = self._hooked._module  # whose parameters take the values of each point
        return StateGuard(copied, skipped=_OWN_ATTRIBUTES, written=copied.parameters())

    @cached_property
    def _hooked(self) -> GradSampleModule:
        return GradSampleModule(copy.deepcopy(self.model), loss_reduction="sum")


_OWN_ATTRIBUTES = ("activations", "max_batch_len")
"""Attributes that Opacus' hooks write to each layer during a pass."""


def find_unsupported_setting(model: nn.Module) -> str | None:
    """Find the first setting of a layer that Opacus 1.6 ignores, with wrong gradients.

    Only max_norm, which rewrites the weight in the forward pass, matters in a frozen layer too.
    """
    for name, layer in model.named_modules():
        trained = any(True for _ in layer.parameters(recurse=False))
        for key, plain in _PLAIN.items():
            value = getattr(layer, key, plain)
            matters = isinstance(layer, _SET) and (trained or key == "max_norm")
            if matters and value != plain:
                return f"it overlooks {key}={value!r} of layer {name!r} ({type(layer).__name__})"
    return None


_SET = (nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)
_PLAIN = {
    "padding_mode": "zeros",
    "padding_idx": None,
    "max_norm": None,
    "scale_grad_by_freq": False,
}
