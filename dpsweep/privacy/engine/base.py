"""What an engine promises: the clipped sum of a query's answers, by whatever way."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from dpsweep.core.types import Clipped, Tensors
from dpsweep.privacy.clip import Clip

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs of shape (B, K), targets of shape (B,)) -> mean over the B examples."""


class Engine(Protocol):
    """A way to let examples answer."""

    @property
    def model(self) -> nn.Module:
        """Called through its parameters alone; its own tensors are not read."""

    def clipped_sum(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Tensor,
        targets_B: Tensor,
        clip: Clip,
    ) -> Clipped:
        """Sum over the batch of each example's clipped answer; zeros for an empty batch.

        Args:
            points: Parameters to ask at.
            weights: Of the gradients there, in the answer.
            inputs_B: Shape (B, ...).
            targets_B: Shape (B,).
            clip: Bounds each answer.
        """
