"""What a CUDA graph of a portion would need: no wait, no constant of the host, fixed shapes.

A graph repeats kernels with the arguments that they were captured with; only tensors may hold
other numbers. Here the aten operations of one portion are noted below autograd and vmap on the
virtual card, and repeated for another batch. What came from the host would be the first batch's.
"""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from virtual import virtual_gpu

from dpsweep.privacy.clip import Automatic, Flat, PerLayer, Quantile
from dpsweep.privacy.engine import BookkeepingEngine, bookkeeping
from dpsweep.privacy.engine.base import Microbatch
from dpsweep.privacy.engine.gradients import Known
from dpsweep.training.device import open_device

CLIPS = {
    "flat": Flat(0.5),
    "automatic": Automatic(0.5),
    "per layer": PerLayer(0.5),
    "quantile": Quantile(0.5, 0.1, 0.5, 0.1),
}
ROWS = 8


class Words(nn.Module):
    """Attention, a norm and an embedding."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(6, 8)
        self.inside = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 4)
        self.register_buffer("numbers", torch.arange(6))

    def forward(self, x):
        tokens = x.flatten(1).view(len(x), 6, 6).repeat(1, 1, 2)[:, :, :8]
        return self.out(self.inside(tokens + self.places(self.numbers.expand(len(x), -1))).mean(1))


def images():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.GroupNorm(1, 3),
        nn.Tanh(),
        nn.Conv2d(3, 16, 3, stride=2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


class Capture(TorchDispatchMode):
    """Notes operations; `repeat` runs them again, on what the tensors hold by then."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def repeat(self):
        """Values of this run, by the tensor that held them in the first one."""
        made = {}

        def now(x):
            return made.get(id(x), x)

        for func, args, kwargs, out in self.calls:
            args, kwargs = tree_map_only(Tensor, now, (args, kwargs))
            again = func(*args, **kwargs)
            pairs = zip(tree_leaves(out), tree_leaves(again), strict=True)
            made |= {id(old): new for old, new in pairs if isinstance(old, Tensor)}
        return now


def known(finite, quiet):
    """The engine's one look at a portion, answered before it is asked."""

    def answer(gradients, squares, factors):
        return dict.fromkeys(gradients, Known(finite, quiet))

    return mock.patch.object(bookkeeping, "_find_needed_checks", answer)


def prepared(make, device, num_points):
    torch.manual_seed(0)
    net = make().to(device, torch.float64)
    engine = BookkeepingEngine(net, nn.functional.cross_entropy, ROWS)
    points = [
        {k: engine._laid_out(p + 0.1 * m).detach() for k, p in net.named_parameters()}
        for m in range(num_points)
    ]
    return engine, points, [1.0, -0.5][:num_points]


def batch(seed, device):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(ROWS, 1, 6, 6, generator=rng, dtype=torch.float64).to(device)
    targets = torch.randint(0, 4, (ROWS,), generator=rng).to(device)
    return Microbatch(inputs, targets, (torch.arange(ROWS) < ROWS - seed).to(device))


CASES = [
    *((images, clip, 1) for clip in CLIPS),
    (images, "flat", 2),
    (Words, "flat", 1),
    (Words, "automatic", 2),
]


@pytest.mark.parametrize(("make", "clip", "num_points"), CASES)
def test_a_portion_repeated_for_another_batch_gives_the_bits_of_that_batch(make, clip, num_points):
    with virtual_gpu() as gpu:
        device = open_device("cuda")
        engine, points, weights = prepared(make, device, num_points)
        first, second = batch(1, device), batch(2, device)
        with known(finite=True, quiet=True):
            engine._portion(points, weights, first, CLIPS[clip])  # constants are cached
            gpu.restart()
            with Capture() as capture:
                found = engine._portion(points, weights, first, CLIPS[clip])
            assert not gpu.waits
            assert not any(gpu.copies.values())
            expected = engine._portion(points, weights, second, CLIPS[clip])
            for mine, other in zip(first, second, strict=True):
                mine.copy_(other)  # as one fills the tensors that a graph reads
            now = capture.repeat()
        for name, leaf in expected.items():
            assert torch.equal(now(found[name]), leaf), name
            assert not torch.equal(now(found[name]), found[name]), name


@pytest.mark.parametrize("make", [images, Words])
def test_the_one_wait_of_a_portion_is_the_look_at_its_flags(make):
    with virtual_gpu() as gpu:
        device = open_device("cuda")
        engine, points, weights = prepared(make, device, 1)
        portion = batch(1, device)
        engine._portion(points, weights, portion, CLIPS["flat"])
        gpu.restart()
        engine._portion(points, weights, portion, CLIPS["flat"])
        (wait,) = gpu.waits
        assert wait.startswith("tolist at privacy/engine/bookkeeping.py")
        assert not gpu.copies["up"]


def test_a_constant_of_the_host_is_found():
    """The proof can fail: a factor that is read from the batch stays that of the first one."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = images()

        def forward(self, x):
            return self.inside(x) * (1 + float(x.detach().abs().max()))

    with virtual_gpu() as gpu:
        device = open_device("cuda")
        engine, points, weights = prepared(Scaled, device, 1)
        first, second = batch(1, device), batch(2, device)
        with known(finite=True, quiet=True):
            with Capture() as capture:
                found = engine._portion(points, weights, first, CLIPS["flat"])
            assert gpu.waits
            expected = engine._portion(points, weights, second, CLIPS["flat"])
            for mine, other in zip(first, second, strict=True):
                mine.copy_(other)
            now = capture.repeat()
        assert any(not torch.equal(now(found[name]), leaf) for name, leaf in expected.items())
