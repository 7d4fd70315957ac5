"""Torch's optimizers without torch's compiler, and the update of AdamBC (adam.py).

torch.optim imports torch.compile's compiler, with sympy, when an optimizer is made and again in
each step, only to turn it off: 1.6 s of CPU time in every worker, which compiles nothing. What it
wraps is kept in `__wrapped__`, which the classes here call directly, with the same arithmetic.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

_WRAPPED = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
"""Methods of every optimizer that import the compiler when they are called first."""

_made: dict[Any, Any] = {}

Kind = TypeVar("Kind", bound=Optimizer)


def make_eager(kind: type[Kind]) -> type[Kind]:
    """Make the subclass of a torch optimizer that never imports the compiler."""
    if kind not in _made:
        methods = {name: inspect.unwrap(getattr(Optimizer, name)) for name in _WRAPPED}
        # torch's own wrapper of `step` does the same, after it has imported the compiler
        step = torch.no_grad()(inspect.unwrap(kind.step))
        _made[kind] = type(kind.__name__, (kind,), {**methods, "step": step})
    found: type[Kind] = _made[kind]
    return found


NOISE_VARIANCES = "noise_variances"
"""Key of the parameter group: variance of the noise in this step's gradient, per parameter."""


class NoiseCorrectedAdam(Optimizer):
    """Reads NOISE_VARIANCES of its group at every step.

    Phi is the average of the variances with the second moment's own weights, which for a
    constant one is that constant.
    """

    def __init__(self, params: Iterable[Tensor], defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, NOISE_VARIANCES: []})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter by its gradient."""
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
