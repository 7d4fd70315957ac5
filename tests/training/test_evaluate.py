"""Scores are means over the validation examples, however they are portioned."""

import pytest
import torch
from torch import nn

from dpsweep.data.read import Dataset
from dpsweep.training.evaluate import evaluate


def examples(num: int) -> Dataset:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 17, (num, 1, 2, 2), generator=rng, dtype=torch.uint8)
    targets = torch.randint(0, 3, (num,), generator=rng)
    return Dataset(inputs[:0], targets[:0], inputs, targets, brightest=16)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("num", [1, 999, 1000, 1001, 2500])
def test_scores_are_means_over_all_examples(num):
    data, net = examples(num), network()
    score = evaluate(net, dict(net.named_parameters()), data, torch.float64)
    logits = net(data.valid_inputs.double() / 8 - 1)
    loss = nn.functional.cross_entropy(logits, data.valid_targets)
    right = (logits.argmax(1) == data.valid_targets).double().mean()
    assert score["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert score["accuracy"] == pytest.approx(right.item(), rel=1e-12)


def test_the_given_parameters_are_measured_and_not_the_models_own():
    data, net = examples(50), network()
    sure = {k: torch.zeros_like(p) for k, p in net.named_parameters()}
    sure["1.bias"] = torch.tensor([0.0, 100.0, 0.0], dtype=torch.float64)
    score = evaluate(net, sure, data, torch.float64)
    assert score["accuracy"] == (data.valid_targets == 1).double().mean().item()
