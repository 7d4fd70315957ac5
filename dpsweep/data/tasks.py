"""Tasks: what a model is trained and measured by.

A task has the loss of one example, the targets that checks draw, and its metrics. A loss sees one
example at a time, and engines call it so: a mean over the batch, or over its tokens, would let one
example change another's gradient. Metrics are computed from sums over the validation data, so that
no more than a few outputs are in memory at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dpsweep.core.strict import Strict

if TYPE_CHECKING:
    from torch import Tensor


class Task(Strict):
    """Base of every task."""

    def loss(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        """Mean over the examples of each one's own loss, a scalar.

        Args:
            outputs_B: What the model returns, shape (B, ...).
            targets_B: Shape (B, ...).
        """
        raise NotImplementedError

    def draw_targets(self, num: int, outputs: tuple[int, ...]) -> Tensor:
        """Draw public targets for checks, shape (num, ...); neighbours differ where they can.

        Args:
            num: How many.
            outputs: Shape of what the model returns for one example.
        """
        raise NotImplementedError

    def sums(self, outputs_B: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        """Sums over some examples from which `metrics` are computed, by name."""
        raise NotImplementedError

    def metrics(self, sums: dict[str, Tensor], num: int) -> dict[str, float]:
        """Compute the metrics of `num` examples from their sums, in double: loss, and others."""
        raise NotImplementedError


class Classification(Task):
    """One class for each example; cross-entropy, in nats."""

    name: Literal["classification"] = "classification"

    def loss(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs_B, targets_B)

    def draw_targets(self, num: int, outputs: tuple[int, ...]) -> Tensor:
        import torch

        return torch.arange(num) % outputs[-1]

    def sums(self, outputs_B: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        from torch.nn.functional import cross_entropy

        return {
            "right": (outputs_B.argmax(1) == targets_B).sum(),
            "loss": cross_entropy(outputs_B, targets_B, reduction="sum"),
        }

    def metrics(self, sums: dict[str, Tensor], num: int) -> dict[str, float]:
        return {"accuracy": float(sums["right"]) / num, "loss": float(sums["loss"]) / num}


CLASSIFICATION = Classification()
