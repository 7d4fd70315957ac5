"""Adam and AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019) by torch, and our AdamBC."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field

from dpsweep.optim.base import Base

if TYPE_CHECKING:
    import torch


class _Moments(Base):
    """The two moments' decays, shared by both."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment per step."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment per step."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment, in gradient units. Not the privacy budget."""

    def fit_to_noise(self, ratio: float) -> Self:
        """Itself: Adam divides by the noise's own size, so its best step does not depend on it."""
        return self

    def reach(self, length: float) -> float:
        """1: each weight's step is its mean gradient by its size, whatever the length."""
        return 1.0

    def build(self, params: Iterable[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        import torch

        from dpsweep.optim.eager import make_eager

        return make_eager(torch.optim.AdamW if isinstance(self, AdamW) else torch.optim.Adam)(
            params,
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


class Adam(_Moments):
    """torch.optim.Adam."""

    name: Literal["adam"] = "adam"


class AdamW(_Moments):
    """torch.optim.AdamW: Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"


class AdamBC(Base):
    """Adam whose second moment is corrected for the noise that DP put into it.

        theta -= lr m^ / sqrt(max(v^ - Phi, floor)),      Phi = E[noise^2] of the gradient it gets

    The square of a noisy gradient is, on average, the square of the clean one plus the noise's
    variance. At DP's noise levels the second part is nearly all of v^, so that plain Adam divides
    by the noise and becomes SGD with momentum; the variance is public, and is taken off (Tang et
    al. 2024, arXiv:2312.14334, eq. 4).
    """

    letters: ClassVar[dict[str, str]] = {**Base.letters, "gamma'": "floor"}

    name: Literal["adambc"] = "adambc"

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment per step."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment per step."""

    floor: float = Field(default=1e-7, gt=0)
    """gamma' in the paper: least corrected second moment, in squared gradient units. Its root
    bounds the step at lr / sqrt(floor) times the first moment. Print: 1e-8 to 1e-6. Without
    optimizer.lr the default is twice the variance of a gradient's noise."""

    def fit_to_noise(self, ratio: float) -> Self:
        """The same with a floor `ratio`^2 times as high, as the error of v^ - Phi is.

        Where the floor binds, the step of a weight is lr / sqrt(floor) times the first moment: it
        falls with the noise, as SGD's does.
        """
        return self.model_copy(update={"floor": float(f"{self.floor * ratio**2:.12g}")})

    def reach(self, length: float) -> float:
        """1: each weight's step is its mean gradient by its size, whatever the length."""
        return 1.0

    def build(self, params: Iterable[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        from dpsweep.optim.eager import NoiseCorrectedAdam, make_eager

        return make_eager(NoiseCorrectedAdam)(
            params,
            {
                "lr": lr,
                "beta1": self.beta1,
                "beta2": self.beta2,
                "floor": self.floor,
                "weight_decay": self.weight_decay,
            },
        )
