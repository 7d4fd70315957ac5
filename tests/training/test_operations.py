"""A step dispatches few operations of torch: on small models they are what it costs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dpsweep.config.source import Source
from dpsweep.config.trial import load_trial
from dpsweep.core.seeds import Secret
from dpsweep.training.assemble import assemble_step, initial_params


class Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher."""

    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("model", "most"), [("linear", 115), ("cnn_small", 350)])
def test_operations_of_a_step(model, most):
    """docs/benchmarks/step.md has the counts; 231 and 702 before they were cut."""
    tree = {
        "data": {"name": "digits"},
        "model": {"name": model},
        "privacy": {"epsilon": 4},
        "train": {"batch_size": 256, "epochs": 30, "device": "cpu", "threads": 1},
        "optimizer": {"lr": 1.0},
        "method": {"name": "dp_sgd"},
    }
    step = assemble_step(
        load_trial(Source("x.yaml", tree, {})), Secret.fixed("x"), torch.device("cpu")
    )
    progress = step.start(initial_params(step))
    step(progress)  # the first one makes what the others find made
    with Operations() as operations:
        step(progress)
    assert operations.num <= most
