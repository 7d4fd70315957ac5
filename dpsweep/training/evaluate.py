"""Measuring an iterate on the declared validation data, and never on the training data."""

import torch
from torch import nn

from dpsweep.core.inputs import apply_model, take_rows
from dpsweep.core.types import Tensors
from dpsweep.data.read import Dataset
from dpsweep.privacy.engine.state_guard import StateGuard
from dpsweep.training.generate import measure_texts

AT_ONCE = 1000
"""Examples that are measured together, if there is memory for them."""

_MOST_OUTPUTS = 2**26
"""Numbers that a model gives at once while it is measured."""


@torch.no_grad()
def sum_validation(
    model: nn.Module, params: Tensors, data: Dataset, dtype: torch.dtype, at_once: int = AT_ONCE
) -> dict[str, torch.Tensor]:
    """Sums of the task over the validation data, by `at_once` examples at a time, in double.

    Where texts are to be written, their metrics stand among the sums.

    Raises:
        ConfigError: If the model remembers what it is measured on. Examples that are held out of
            the training data are measured without noise, and must reach no weights or buffers.
    """
    params = {k: p.detach() for k, p in params.items()}
    guard, before = StateGuard(model), [p.clone() for p in params.values()]
    sums: dict[str, torch.Tensor] = {}
    num = len(data.valid_targets)
    if data.fields is not None:  # a language model has its whole vocabulary at each position
        inputs = data.scaled(take_rows(data.valid_inputs, slice(1)), dtype)
        each = apply_model(model, inputs, params).numel()
        at_once = max(1, min(at_once, _MOST_OUTPUTS // each))
    for start in range(0, num, at_once):
        rows = slice(start, start + at_once)
        inputs = data.scaled(take_rows(data.valid_inputs, rows), dtype)
        outputs = apply_model(model, inputs, params)
        for name, x in data.task.sums(outputs, data.valid_targets[rows]).items():
            sums[name] = sums.get(name, 0) + x.double()
    if data.texts is not None:
        metrics = measure_texts(model, params, data, data.texts, at_once)
        sums |= {name: torch.tensor(value) for name, value in metrics.items()}
    guard.check(((f"parameter {k!r}", p) for k, p in params.items()), before)
    return sums


def evaluate(
    model: nn.Module, params: Tensors, data: Dataset, dtype: torch.dtype, at_once: int = AT_ONCE
) -> dict[str, float]:
    """The task's metrics of `model` at `params`; arguments and errors as of `sum_validation`."""
    sums = sum_validation(model, params, data, dtype, at_once)
    return data.task.compute_metrics(sums, len(data.valid_targets))
