"""What is read once a portion on a GPU changes no sum: not of an example that is not finite."""

import math

import pytest
import torch
from torch import nn
from virtual import virtual_gpu

from dpsweep.privacy import clip as clipping
from dpsweep.privacy.clip import Automatic, Flat, PerLayer, Quantile
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine, bookkeeping, conv, gradients
from dpsweep.training.device import open_device

CLIPS = {
    "flat": Flat(0.5),
    "automatic": Automatic(0.5),
    "per layer": PerLayer(0.5),
    "quantile": Quantile(0.5, 0.1, 0.5, 0.1),
}


class Net(nn.Module):
    """Every kind of record: convolutions by both forms, a norm, an embedding, linear layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.GroupNorm(1, 3)
        self.wide = nn.Conv2d(3, 16, 3, stride=2)
        self.places = nn.Embedding(16, 4)
        self.out = nn.Linear(20, 4)

    def forward(self, x):
        y = self.wide(self.norm(self.conv(x)).tanh()).amax((2, 3))
        numbers = torch.arange(16, device=x.device).expand(len(x), -1)
        return self.out(torch.cat([y, self.places(numbers).mean(1)], 1))


def sums(device, clip, wild, engine, num_points):
    torch.manual_seed(0)
    net = Net().to(device, torch.float64)
    inputs = torch.randn(10, 1, 6, 6, dtype=torch.float64)
    inputs[0] = wild
    targets = torch.arange(10) % 4
    points = [
        {k: (p + 0.1 * m).detach() for k, p in net.named_parameters()} for m in range(num_points)
    ]
    weights = [1.0, -0.5][:num_points]
    made = engine(net, nn.functional.cross_entropy, 12)
    return made.clipped_sum(points, weights, inputs.to(device), targets.to(device), clip)


CASES = [
    *((clip, math.nan, BookkeepingEngine, 1) for clip in CLIPS),
    *((clip, 1e200, BookkeepingEngine, 2) for clip in CLIPS),
    ("flat", math.inf, BookkeepingEngine, 2),
    ("flat", 0.5, BookkeepingEngine, 1),
    ("flat", math.nan, VmapEngine, 2),
]


@pytest.mark.parametrize(("clip", "wild", "engine", "num_points"), CASES)
def test_sums_on_cuda_are_those_on_a_cpu(monkeypatch, clip, wild, engine, num_points):
    # the rows that fill up are copies of the first example, and in another slice than it
    for module in (bookkeeping, clipping, gradients, conv):
        monkeypatch.setattr(module, "SUMMED", 4)
    expected = sums("cpu", CLIPS[clip], wild, engine, num_points)
    with virtual_gpu() as gpu:
        found = sums(open_device("cuda"), CLIPS[clip], wild, engine, num_points)
        assert gpu.mixed == []
    for name, leaf in expected.items():
        assert leaf.isfinite().all()
        torch.testing.assert_close(found[name], leaf, rtol=1e-9, atol=1e-12)


def test_examples_whose_points_cancel_are_found_by_the_same_look(monkeypatch):
    monkeypatch.setattr(gradients, "_CANCELLATION", 0.0)  # all of them, from here on
    expected = sums("cpu", CLIPS["flat"], 0.5, BookkeepingEngine, 2)
    with virtual_gpu() as gpu:
        found = sums(open_device("cuda"), CLIPS["flat"], 0.5, BookkeepingEngine, 2)
        assert len([w for w in gpu.waits if "bookkeeping" in w]) == 1
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-9, atol=1e-12)
