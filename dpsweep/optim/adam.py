"""Adam and AdamW (Kingma and Ba 2015; Loshchilov and Hutter 2019), as torch computes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Self

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


class Adam(_Moments):
    """torch.optim.Adam."""

    name: Literal["adam"] = "adam"

    def build(self, params: Iterable[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        import torch

        from dpsweep.optim.eager import make_eager

        return make_eager(torch.optim.Adam)(
            params,
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


class AdamW(_Moments):
    """torch.optim.AdamW: Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"

    def build(self, params: Iterable[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        import torch

        from dpsweep.optim.eager import make_eager

        return make_eager(torch.optim.AdamW)(
            params,
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )
