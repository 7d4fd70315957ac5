"""Stochastic gradient descent: x_{t+1} = x_t - lr_t g_t, with optional heavy-ball momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsweep.optim.base import Base

if TYPE_CHECKING:
    import torch


class Sgd(Base):
    """torch.optim.SGD. Its momentum acts on released gradients, so it costs no privacy."""

    name: Literal["sgd"] = "sgd"

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Heavy-ball momentum; 0 is plain SGD, as in DP-SGD."""

    def reach(self, length: float) -> float:
        """The length by the momentum's gain at frequency zero, 1 / (1 - momentum)."""
        return length / (1 - self.momentum)

    def build(self, params: Iterable[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        import torch

        from dpsweep.optim.eager import make_eager

        return make_eager(torch.optim.SGD)(
            params,
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            foreach=True,  # one call for all parameters, of the same arithmetic
        )
