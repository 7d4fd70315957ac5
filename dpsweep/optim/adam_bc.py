"""AdamBC: Adam whose second moment is corrected for the noise that DP put into it.

    theta -= lr m^ / sqrt(max(v^ - Phi, floor)),      Phi = E[noise^2] of the gradient it is given

The square of a noisy gradient is, on average, the square of the clean one plus the noise's
variance. At DP's noise levels the second part is nearly all of v^, so that plain Adam divides
by the noise and becomes SGD with momentum; the variance is public, and is taken off (Tang et
al. 2024, arXiv:2312.14334, eq. 4).
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dpsweep.optim.base import Base

NOISE_VARIANCES = "noise_variances"
"""Key of the parameter group: variance of the noise in this step's gradient, per parameter."""


class AdamBC(Base):
    """Adam with the noise's variance taken off its second moment."""

    letters: ClassVar[dict[str, str]] = {**Base.letters, "gamma'": "floor"}

    name: Literal["adambc"] = "adambc"

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment per step."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment per step."""

    floor: float = Field(default=1e-7, gt=0)
    """gamma' in the paper: least corrected second moment, in squared gradient units. Its root
    bounds the step at lr / sqrt(floor) times the first moment. Print: 1e-8 to 1e-6."""

    def build(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        return _AdamBC(
            params,
            {
                "lr": self.lr,
                "beta1": self.beta1,
                "beta2": self.beta2,
                "floor": self.floor,
                "weight_decay": self.weight_decay,
            },
        )


class _AdamBC(torch.optim.Optimizer):
    """Reads NOISE_VARIANCES of its group at every step.

    Phi is the average of the variances with the second moment's own weights, which for a
    constant one is that constant.
    """

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, NOISE_VARIANCES: []})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Moves every parameter by its gradient."""
        for group in self.param_groups:
            for param, variance in zip(group["params"], group[NOISE_VARIANCES], strict=True):
                self._update(param, variance, group)

    def _update(self, param: Tensor, variance: float, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            zero = torch.zeros_like(param)
            state.update(step=0, mean=zero, square=zero.clone(), noise=0.0)
        beta1, beta2 = group["beta1"], group["beta2"]
        grad = param.grad + group["weight_decay"] * param
        state["step"] += 1
        state["mean"] = beta1 * state["mean"] + (1 - beta1) * grad
        state["square"] = beta2 * state["square"] + (1 - beta2) * grad.square()
        state["noise"] = beta2 * state["noise"] + (1 - beta2) * variance
        rise1, rise2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        corrected = (state["square"] - state["noise"]) / rise2
        param -= group["lr"] / rise1 * state["mean"] / corrected.clamp(min=group["floor"]).sqrt()
