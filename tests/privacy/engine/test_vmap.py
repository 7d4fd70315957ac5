"""The engine's sum is that of answers taken one example at a time by plain autograd."""

import math

import pytest
import torch
from torch import nn

from dpsweep.core.types import Tensors
from dpsweep.privacy.clip import Automatic, Clip, Flat, PerLayer
from dpsweep.privacy.engine.vmap import VmapEngine

NUM = 23
CLIPS = {
    "none in effect": Flat(1e9),
    "flat": Flat(0.8),
    "automatic": Automatic(0.8),
    "per layer": PerLayer(0.8),
}
QUERIES = {
    "one point": [1.0],
    "both signs": [-3.7, 4.7],
    "three points": [0.2, 1.5, -0.7],
    "weights cancel": [1.0, -1.0],
}
every_query = pytest.mark.parametrize("weights", QUERIES.values(), ids=QUERIES)
every_clip = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Convolution, norm and linear layer, with one scalar-shaped detail: a bias of one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Tanh(),
            nn.GroupNorm(2, 4),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
            nn.Linear(5, 1),
            nn.Linear(1, 4),
        )
    return net.to(dtype)


def batch(dtype: torch.dtype = torch.float64, num: int = NUM) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    inputs = torch.randn(num, 2, 4, 4, generator=rng, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(0, 4, (num,), generator=rng)


def points(num: int, dtype: torch.dtype = torch.float64) -> list[Tensors]:
    """Points far enough apart for gradients to differ; the first is the network's own."""
    rng = torch.Generator().manual_seed(3)
    return [
        {
            k: p.detach() + 0.3 * m * torch.randn(p.shape, generator=rng, dtype=p.dtype)
            for k, p in network(dtype).named_parameters()
        }
        for m in range(num)
    ]


def engine(dtype: torch.dtype = torch.float64, at_once: int = NUM) -> VmapEngine:
    return VmapEngine(network(dtype), nn.functional.cross_entropy, at_once)


def one_at_a_time(
    where: list[Tensors], weights: list[float], clip: Clip, dtype: torch.dtype
) -> torch.Tensor:
    """Clipped sum over the batch by torch.autograd, example by example, shape (P,)."""
    inputs, targets = batch(dtype)
    total = torch.zeros(sum(p.numel() for p in where[0].values()), dtype=dtype)
    nets = [network(dtype) for _ in where]
    for net, point in zip(nets, where, strict=True):
        net.load_state_dict(point)
    for i in range(NUM):
        answer = {k: torch.zeros_like(p) for k, p in where[0].items()}
        for net, weight in zip(nets, weights, strict=True):
            loss = nn.functional.cross_entropy(net(inputs[i : i + 1]), targets[i : i + 1])
            gradient = torch.autograd.grad(loss, list(net.parameters()))
            for leaf, g in zip(answer.values(), gradient, strict=True):
                leaf += weight * g
        factors = clip.factors({k: u.square().sum().view(1) for k, u in answer.items()})
        total += flat({k: factors[k] * u for k, u in answer.items()})
    return total


def flat(tree: Tensors) -> torch.Tensor:
    return torch.cat([x.flatten() for x in tree.values()])


@every_clip
@every_query
def test_sum_equals_plain_autograd_in_double_precision(weights, clip):
    where = points(len(weights))
    total = engine().clipped_sum(where, weights, *batch(), clip)
    expected = one_at_a_time(where, weights, clip, torch.float64)
    assert expected.norm() > 1e-3 or weights == QUERIES["weights cancel"]
    torch.testing.assert_close(flat(total), expected, rtol=1e-10, atol=1e-10)


@every_clip
@every_query
def test_sum_equals_plain_autograd_in_single_precision(weights, clip):
    where = points(len(weights), torch.float32)
    total = engine(torch.float32).clipped_sum(where, weights, *batch(torch.float32), clip)
    expected = one_at_a_time(where, weights, clip, torch.float32)
    assert flat(total).dtype == torch.float64  # microbatches add up in double
    assert (flat(total) - expected).norm() <= 1e-5 * expected.norm()


@every_clip
@pytest.mark.parametrize("at_once", [1, 7, NUM, 1000])
def test_microbatches_change_nothing(at_once, clip):
    where, weights = points(2), QUERIES["both signs"]
    whole = flat(engine().clipped_sum(where, weights, *batch(), clip))
    parts = flat(engine(at_once=at_once).clipped_sum(where, weights, *batch(), clip))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_empty_batch_sums_to_zeros_like_the_parameters(dtype):
    where = points(2, dtype)
    total = engine(dtype).clipped_sum(where, [0.5, 0.5], *batch(dtype, num=0), Flat(1.0))
    assert {k: x.shape for k, x in total.items()} == {k: x.shape for k, x in where[0].items()}
    assert all(x.dtype == torch.float64 for x in total.values())
    assert (flat(total) == 0).all()


def test_names_come_in_the_models_order():
    total = engine().clipped_sum(points(2), [0.5, 0.5], *batch(), Flat(1.0))
    assert list(total) == [k for k, _ in network().named_parameters()]


def test_the_models_own_tensors_are_neither_read_nor_written():
    where = points(2)
    spoiled = engine()
    for p in spoiled.model.parameters():
        p.data.fill_(math.nan)
    total = spoiled.clipped_sum(where, [0.5, 0.5], *batch(), Flat(1.0))
    assert torch.equal(
        flat(total), flat(engine().clipped_sum(where, [0.5, 0.5], *batch(), Flat(1.0)))
    )
    assert all(p.isnan().all() and p.grad is None for p in spoiled.model.parameters())


def test_points_are_left_as_they_were():
    where = points(2)
    engine().clipped_sum(where, [0.5, 0.5], *batch(), Flat(1.0))
    for point, before in zip(where, points(2), strict=True):
        assert torch.equal(flat(point), flat(before))


def test_example_whose_gradient_is_not_finite_counts_as_zero():
    inputs, targets = batch()
    whole = flat(engine().clipped_sum(points(1), [1.0], inputs, targets, Flat(0.8)))
    spoiled = torch.cat([inputs, torch.full_like(inputs[:1], math.inf)])
    more = torch.cat([targets, targets[:1]])
    total = flat(engine(at_once=100).clipped_sum(points(1), [1.0], spoiled, more, Flat(0.8)))
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
