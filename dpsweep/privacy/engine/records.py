"""Answers from records: each layer's input and the gradient of its output, at every point.

One forward and one backward pass a point, over the whole microbatch, down to the layers'
outputs; no layer mixes examples, so row b of every record is example b's own. What a layer
with a map of its own (privacy/geometry.py) answers is never materialised: its norm and its
clipped sum come from the records. Other layers' answers, biases and norm layers here, are
computed module by module.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from dpsweep.core.types import Clipped, PerExample, Tensors
from dpsweep.privacy.clip import Clip, add, scaling, weighted_sum
from dpsweep.privacy.engine.base import Loss
from dpsweep.privacy.geometry import Geometry
from dpsweep.privacy.spectral import Records


@dataclass(frozen=True)
class RecordsEngine:
    """Answers of models in which every layer with weights is called once.

    Attributes:
        model: Called through its parameters alone; its own tensors are not read.
        loss: Loss of one example.
        max_physical_batch: Examples whose records are in memory at once.
        geometry: Which parameters answer in white coordinates.
    """

    model: nn.Module
    loss: Loss
    max_physical_batch: int
    geometry: Geometry

    def clipped_sum(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Tensor,
        targets_B: Tensor,
        clip: Clip,
    ) -> Clipped:
        """Sum over the batch of each example's clipped answer; zeros for an empty batch."""
        total = self._nobody(points[0], clip)
        chunks = zip(
            torch.split(inputs_B, self.max_physical_batch),
            torch.split(targets_B, self.max_physical_batch),
            strict=True,
        )
        for inputs, targets in chunks:
            if len(inputs):  # split gives one empty chunk for an empty batch
                total = add(total, self._chunk(points, weights, inputs, targets, clip))
        return total

    def _nobody(self, params: Tensors, clip: Clip) -> Clipped:
        maps = self.geometry.maps
        shapes = {k: maps[k].white_shape if k in maps else p.shape for k, p in params.items()}
        _, count = scaling({k: p.new_zeros(0).double() for k, p in params.items()}, clip)
        zeros = {k: p.new_zeros(shapes[k], dtype=torch.float64) for k, p in params.items()}
        return Clipped(zeros | count)

    def _chunk(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Tensor,
        targets_B: Tensor,
        clip: Clip,
    ) -> Clipped:
        passes = [self._pass(point, inputs_B, targets_B) for point in points]
        mapped: dict[str, Records] = {}
        plain = PerExample({})
        for name, module in self.model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not own:
                continue
            records = Records(
                weights=tuple(weights),
                inputs=tuple(one[name][0] for one in passes),
                grads=tuple(one[name][1] for one in passes),
            )
            prefix = f"{name}." if name else ""
            for key in own:
                if prefix + key in self.geometry.maps:
                    mapped[prefix + key] = records
            rest = [key for key in own if prefix + key not in self.geometry.maps]
            for key, answer in _answers(module, prefix, rest, points, records).items():
                plain[prefix + key] = answer
        squares = {
            k: self.geometry.maps[k].squares(mapped[k])
            if k in mapped
            else plain[k].unsqueeze(-1).flatten(1).square().sum(1).double()
            for k in points[0]
        }
        factors, count = scaling(squares, clip)
        total = {
            k: self.geometry.maps[k].coordinates(mapped[k], factors[k])
            if k in mapped
            else weighted_sum(factors[k], plain[k])
            for k in points[0]
        }
        return Clipped(total | count)

    def _pass(
        self, params: Tensors, inputs_B: Tensor, targets_B: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Module name -> (its input, the gradient of each example's loss by its output)."""
        inputs: Tensors = {}
        outputs: Tensors = {}

        def note(name: str, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = args[0].detach()
            outputs[name] = output if output.requires_grad else output.requires_grad_()

        hooks = [
            module.register_forward_hook(lambda _, args, out, name=name: note(name, args, out))
            for name, module in self.model.named_modules()
            if list(module.parameters(recurse=False))
        ]
        try:
            with torch.enable_grad():
                logits = functional_call(self.model, params, (inputs_B,))
                losses_B = vmap(lambda o, y: self.loss(o[None], y[None]))(logits, targets_B)
                grads = torch.autograd.grad(losses_B.sum(), list(outputs.values()))
        finally:
            for hook in hooks:
                hook.remove()
        return {name: (inputs[name], g) for name, g in zip(outputs, grads, strict=True)}


def _answers(
    module: nn.Module,
    prefix: str,
    keys: list[str],
    points: Sequence[Tensors],
    records: Records,
) -> Tensors:
    """The answers of some of a module's parameters, shape (B, *param.shape), over all points."""
    if not keys:
        return {}
    total: Tensors = {}
    for weight, point, a_B, b_B in zip(
        records.weights, points, records.inputs, records.grads, strict=True
    ):
        own = {k.removeprefix(prefix): x for k, x in point.items() if k.startswith(prefix)}
        for key, grad in _per_example(module, own, keys, a_B, b_B).items():
            total[key] = total[key] + weight * grad if key in total else weight * grad
    return total


def _per_example(
    module: nn.Module, own: Tensors, keys: list[str], a_B: Tensor, b_B: Tensor
) -> Tensors:
    """b_b^T d(module)/d(parameter) for each example b; one reverse pass over the module alone."""
    if keys == ["bias"] and isinstance(module, nn.Conv2d):
        return {"bias": b_B.sum((2, 3))}
    fixed = {k: x for k, x in own.items() if k not in keys}

    def one(a: Tensor, b: Tensor) -> Tensors:
        def run(params: Tensors) -> Tensor:
            output: Tensor = functional_call(module, fixed | params, (a[None],))
            return output

        back = vjp(run, {k: own[k] for k in keys})[1]
        (grads,) = back(b[None])
        return dict(grads)

    return dict(vmap(one)(a_B, b_B))
