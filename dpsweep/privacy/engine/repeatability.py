"""Check that a model and its loss return the same again for the same inputs, at the same weights.

A model or loss that does not draws at random or remembers earlier calls, perhaps where
state_guard.py cannot look (a closure, a global, code outside Python). On a CPU a pass is the same
bit for bit. Some CUDA kernels add in an order of their own: what differs by no more than that is
rounding, and the batch-mixing checks then allow for it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpsweep.core.errors import ConfigError
from dpsweep.core.inputs import device_of
from dpsweep.core.types import InputSpec
from dpsweep.privacy.engine.base import DrawTargets, Loss, draw_classes, per_example_loss
from dpsweep.privacy.engine.calls import (
    call_model,
    draw_examples,
    isolate_generators,
    perturb_parameters,
)

_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Rounding by the order of a sum on a GPU, relative to the largest number of a tensor."""

_EXAMPLES, _SEED = 4, 100


def check_repeats(
    before: Iterable[Tensor],
    after: Iterable[Tensor],
    dtype: torch.dtype,
    key: str = "model, or the loss of data.task",
) -> float:
    """Compare what two passes over the same batch gave.

    Args:
        before: Tensors of one pass.
        after: Those of the other.
        dtype: In which they were computed.
        key: Where a config names the model.

    Returns:
        Their largest difference, relative to the largest number: 0 on a CPU.

    Raises:
        ConfigError: If they differ at all on a CPU, or by more than rounding on a GPU.
    """
    one, two = list(before), list(after)
    apart = relative_difference(one, two)
    if not apart <= _allowed_rounding(one, dtype):
        raise ConfigError(
            f"{key}: it gives another answer when it is asked the same again, so it draws at "
            f"random or remembers earlier calls, where no attribute shows it (a global, a "
            f"closure). Such an answer tells of other examples, past clipping and noise: even "
            f"the number of calls does, which follows the secret batches. Make it a function of "
            f"its arguments alone"
        )
    return apart


def _allowed_rounding(tensors: Sequence[Tensor], dtype: torch.dtype) -> float:
    return 0.0 if all(x.is_cpu for x in tensors) else _ROUNDING[dtype]


def relative_difference(one: Sequence[Tensor], two: Sequence[Tensor]) -> float:
    """Largest difference over the largest number; infinite if shapes or NaN are elsewhere.

    >>> relative_difference([torch.tensor([1.0, -4.0])], [torch.tensor([1.5, -4.0])])
    0.125
    """
    if [(x.shape, x.dtype) for x in one] != [(x.shape, x.dtype) for x in two]:
        return math.inf
    if all(torch.equal(a, b) for a, b in zip(one, two, strict=True)):
        return 0.0
    largest = apart = 0.0
    for a, b in zip((x.double() for x in one), (x.double() for x in two), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0, (a - b).abs())
        if not bool(gap.isfinite().all()):
            return math.inf
        apart, largest = max(apart, _largest(gap)), max(largest, _largest(a[a.isfinite()]))
    return apart and apart / max(largest, apart)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def are_equal(one: Sequence[Tensor], two: Sequence[Tensor], rounding: float = 0.0) -> bool:
    """True if tensors are equal, but for twice the `rounding` between two passes of one batch."""
    if rounding:
        return relative_difference(one, two) <= 2 * rounding
    return len(one) == len(two) and all(map(torch.equal, one, two))


@dataclass(frozen=True)
class Probe:
    """Outputs of a model for some random inputs before training, to be compared during it.

    Weights, inputs and targets are fixed and public, so whatever changes the outputs or their
    losses is a memory of the calls in between. It is found at the next `check`, not in the batch
    that it was made in.

    Attributes:
        model: The model.
        spec: Inputs of one example.
        loss: Mean loss of some outputs; None to look at the outputs alone.
        draw_targets: Draws targets for the loss.
        outputs_B: The model's outputs before training.
        losses_B: Their losses, each by itself; empty without a loss.
    """

    model: nn.Module
    spec: InputSpec
    loss: Loss | None
    draw_targets: DrawTargets
    outputs_B: Tensor
    losses_B: Tensor

    @classmethod
    def of(
        cls,
        model: nn.Module,
        spec: InputSpec,
        loss: Loss | None = None,
        draw_targets: DrawTargets = draw_classes,
    ) -> "Probe":
        """Compute the outputs and losses before training."""
        outputs_B = _compute_outputs(model, spec)
        return cls(
            model, spec, loss, draw_targets, outputs_B, _losses(loss, outputs_B, draw_targets)
        )

    def check(self) -> None:
        """Compute outputs and losses again, and compare.

        Raises:
            ConfigError: If they are others than before.
        """
        now_B = _compute_outputs(self.model, self.spec)
        check_repeats([self.outputs_B], [now_B], now_B.dtype, "model")
        again_B = _losses(self.loss, self.outputs_B, self.draw_targets)
        check_repeats([self.losses_B], [again_B], now_B.dtype, "data.task")


def _losses(loss: Loss | None, outputs_B: Tensor, draw_targets: DrawTargets) -> Tensor:
    if loss is None:
        return outputs_B.new_zeros(0)
    targets_B = draw_targets(len(outputs_B), tuple(outputs_B.shape[1:])).to(outputs_B.device)
    return per_example_loss(loss, outputs_B, targets_B).detach()


def _compute_outputs(model: nn.Module, spec: InputSpec) -> Tensor:
    point = perturb_parameters(model, torch.Generator().manual_seed(_SEED))
    inputs_B = draw_examples(model, _EXAMPLES, spec, _SEED)
    with isolate_generators(device_of(inputs_B)):
        return call_model(model, point, inputs_B).detach()
