"""What every base optimizer's config holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field

from dpsweep.core.strict import Strict
from dpsweep.optim.schedule import Constant, Cosine

if TYPE_CHECKING:
    import torch


class Base(Strict):
    """Learning rate, its schedule, weight decay."""

    letters: ClassVar[dict[str, str]] = {"eta": "lr"}

    lr: float = Field(gt=0)
    """Learning rate at the schedule's peak."""

    schedule: Constant | Cosine = Field(default=Constant(), discriminator="name")
    """How the learning rate changes over the run."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay, in the way of the named torch optimizer."""

    def fit_to_noise(self, ratio: float) -> Self:
        """The same optimizer for noise that is `ratio` times as strong.

        While noise binds, the best step times the noise multiplier is constant
        (docs/benchmarks/explore.md), so the step is divided by `ratio`.
        """
        # Twelve digits, so that dividing and multiplying again gives the number that was written.
        return self.model_copy(update={"lr": float(f"{self.lr / ratio:.12g}")})

    def build(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Torch's optimizer over `params`, at the peak learning rate."""
        raise NotImplementedError
