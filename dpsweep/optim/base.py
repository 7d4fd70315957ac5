"""Keys that every base optimizer's config has.

The size of the steps is given in one of two ways: as a learning rate, or as the total step

    r = lr * G * S,     S = sum_t lr_t / lr,     G = displacement of a settled step at lr 1

It is the distance that the weights travel in a whole run if every example's gradient is clipped and
all of them point the same way. For SGD, G = C g / (1 - momentum), with C the clip norm and g the
gain of the method's filters at frequency zero. Adam's family divides by the gradient's size, so
that G = 1, and each weight travels r. The best r barely depends on clip norm, batch size and
number of steps (Panda et al. 2024, arXiv:2212.04486; docs/benchmarks/search.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import InvalidKey
from dpsweep.core.strict import Strict, is_unused
from dpsweep.optim.schedule import Constant, Cosine

if TYPE_CHECKING:
    import torch


class Base(Strict):
    """Size of the steps, its schedule, weight decay."""

    letters: ClassVar[dict[str, str]] = {"eta": "lr", "r": "total_step"}

    lr: float | None = Field(default=None, gt=0, exclude_if=is_unused)
    """Learning rate at the schedule's peak. Give it or total_step, never both."""

    total_step: float | None = Field(default=None, gt=0, exclude_if=is_unused)
    """r: how far the weights travel in the whole run if all clipped gradients point the same way.
    With SGD lr = r / (C T), with Adam r / T, for clip norm C and T steps; more in
    docs/guides/search.md. The method's default if neither it nor lr is given."""

    schedule: Constant | Cosine = Field(default=Constant(), discriminator="name")
    """Schedule of the learning rate over the run."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay, in the way of the named torch optimizer."""

    @model_validator(mode="after")
    def _one_size_of_step(self) -> Self:
        if self.lr is not None and self.total_step is not None:
            raise InvalidKey(
                "total_step",
                f"and lr both give the size of a step, got {self.total_step:g} and {self.lr:g}. "
                f"Delete one of the two",
            )
        return self

    def reach(self, length: float) -> float:
        """G: displacement of one settled step at learning rate 1.

        Args:
            length: Norm of the filtered gradient, the same vector at every step.
        """
        raise NotImplementedError

    def fit_to_noise(self, ratio: float) -> Self:
        """Adapt the optimizer to noise that is `ratio` times as strong.

        While noise binds, the best step times the noise multiplier is constant
        (docs/benchmarks/explore.md), so learning rate or total step is divided by `ratio`.
        """
        sizes = {"lr": self.lr, "total_step": self.total_step}
        # Twelve digits, so that dividing and multiplying again gives the number that was written.
        fitted = {k: float(f"{v / ratio:.12g}") for k, v in sizes.items() if v is not None}
        return self.model_copy(update=fitted)

    def build(self, params: Iterable[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        """Torch's optimizer over `params`, at the peak learning rate `lr`."""
        raise NotImplementedError
