"""Torch's optimizers without torch's compiler.

torch.optim imports torch.compile's compiler, with sympy, when an optimizer is made and again in
each step, only to turn it off: 1.6 s of CPU time in every worker, which compiles nothing. What it
wraps is kept in `__wrapped__`, which the classes here call directly, with the same arithmetic.
"""

import inspect
from typing import Any, TypeVar

import torch
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
