"""Measuring an iterate on the declared validation data, and never on the training data."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from dpsweep.core.types import Tensors
from dpsweep.data.read import Dataset

AT_ONCE = 1000
"""Examples that are measured together, if there is memory for them."""


@dataclass(frozen=True)
class Score:
    """Means over the validation data.

    Attributes:
        accuracy: Share of examples classified rightly, in [0, 1].
        loss: Cross-entropy, in nats per example.
    """

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(
    model: nn.Module, params: Tensors, data: Dataset, dtype: torch.dtype, at_once: int = AT_ONCE
) -> Score:
    """Accuracy and loss of `model` at `params`, computed on `at_once` examples at a time."""
    right = torch.zeros((), dtype=torch.int64, device=data.valid_targets.device)
    loss = torch.zeros((), dtype=torch.float64, device=data.valid_targets.device)
    chunks = zip(
        torch.split(data.valid_inputs, at_once),
        torch.split(data.valid_targets, at_once),
        strict=True,
    )
    for inputs, targets in chunks:
        logits = functional_call(model, params, (data.scaled(inputs, dtype),))
        right += (logits.argmax(1) == targets).sum()
        loss += nn.functional.cross_entropy(logits, targets, reduction="sum")
    return Score(int(right) / len(data.valid_targets), float(loss) / len(data.valid_targets))
