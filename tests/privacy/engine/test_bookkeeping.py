"""Answers from records are those of plain autograd, whatever the layers and the query."""

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from oracle import alone, flat
from pairs import pairs
from torch import Tensor, nn

from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.types import PerExample, Released, Tensors
from dpsweep.privacy.clip import Automatic, Flat, PerLayer, Quantile, clipped_sum
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine, make_engine
from dpsweep.privacy.engine.circulant import CirculantGradients
from dpsweep.privacy.engine.conv import PhaseLayout
from dpsweep.privacy.engine.gradients import OuterProducts
from dpsweep.privacy.geometry import IDENTITY, Geometry, Spectral, make_geometry

NUM = 11
SHAPE = (2, 6, 6)
CLIPS = {
    "none in effect": Flat(1e9),
    "flat": Flat(0.8),
    "automatic": Automatic(0.8),
    "per layer": PerLayer(0.8),
    "adaptive": Quantile(0.8, share=0.2, quantile=0.5, rate=0.2),
}
QUERIES = {"one point": [1.0], "both signs": [-3.7, 4.7], "three points": [0.2, 1.5, -0.7]}
every_clip = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
every_query = pytest.mark.parametrize("weights", QUERIES.values(), ids=QUERIES)


class Scale(nn.Module):
    """A parameter without dimensions, and a layer inside the layer that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.7))
        self.inner = nn.Linear(4, 5)

    def forward(self, inputs_B: Tensor) -> Tensor:
        return self.factor * self.inner(inputs_B)


NETS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 3, 3, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(12, 4),
    ),
    "one norm, no biases": lambda: nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), bias=False),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(16),
        nn.Linear(16, 4, bias=False),
    ),
    "circulant": lambda: nn.Sequential(
        nn.Flatten(),
        CirculantLinear(72, 12, block=6),
        nn.Tanh(),
        CirculantLinear(12, 8, block=4, bias=False),
        nn.LayerNorm(8),
        nn.Linear(8, 4),
    ),
    "nested": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(72, 4), Scale(), nn.Tanh(), nn.Linear(5, 4)
    ),
    "one layer over positions": lambda: CirculantLinear(6, 6, block=3),
    "mapped": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 3, 3, bias=False),
        nn.Flatten(),
        CirculantLinear(48, 4, block=2),
    ),
}
every_net = pytest.mark.parametrize("net", NETS)


def network(net: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return NETS[net]().to(dtype)


def loss(outputs_B: Tensor, targets_B: Tensor) -> Tensor:
    """Cross entropy; over positions too, where outputs have any."""
    return nn.functional.cross_entropy(outputs_B.flatten(1), targets_B)


def batch(dtype: torch.dtype = torch.float64, num: int = NUM) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(2)
    inputs = torch.randn(num, *SHAPE, generator=rng, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(0, 4, (num,), generator=rng)


def points(net: str, num: int, dtype: torch.dtype = torch.float64) -> list[Tensors]:
    """Points far enough apart for gradients to differ; the first is the network's own."""
    rng = torch.Generator().manual_seed(3)
    return [
        {
            k: p.detach() + 0.3 * m * torch.randn(p.shape, generator=rng, dtype=p.dtype)
            for k, p in network(net, dtype).named_parameters()
        }
        for m in range(num)
    ]


def engine(
    net: str,
    dtype: torch.dtype = torch.float64,
    at_once: int = NUM,
    geometry: Geometry = IDENTITY,
) -> BookkeepingEngine:
    return BookkeepingEngine(network(net, dtype), loss, at_once, geometry)


@cache
def answers(net: str, query: str, dtype: torch.dtype) -> PerExample:
    """By torch.autograd, example by example."""
    weights = QUERIES[query]
    return alone(
        network(net, dtype), loss, points(net, len(weights), dtype), weights, *batch(dtype)
    )


@pairs(net=NETS.keys(), query=QUERIES.keys(), clip=CLIPS)
def test_sum_equals_plain_autograd_and_the_other_engine_in_double_precision(net, query, clip):
    weights = QUERIES[query]
    where = points(net, len(weights))
    total = engine(net).clipped_sum(where, weights, *batch(), clip)
    expected = clipped_sum(answers(net, query, torch.float64), clip)
    assert list(total) == list(expected)
    assert flat(expected).norm() > 1e-3
    torch.testing.assert_close(flat(total), flat(expected), rtol=1e-10, atol=1e-10)
    other = VmapEngine(network(net), loss, NUM).clipped_sum(where, weights, *batch(), clip)
    assert {k: (x.shape, x.dtype) for k, x in total.items()} == {
        k: (x.shape, x.dtype) for k, x in other.items()
    }
    torch.testing.assert_close(flat(total), flat(other), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("query", QUERIES)
@every_net
def test_sum_equals_plain_autograd_in_single_precision(net, query):
    clip, weights = CLIPS["flat"], QUERIES[query]
    where = points(net, len(weights), torch.float32)
    total = engine(net, torch.float32).clipped_sum(where, weights, *batch(torch.float32), clip)
    expected = clipped_sum(answers(net, query, torch.float32), clip)
    assert all(x.dtype == torch.float64 for x in total.values())  # microbatches add up in double
    assert (flat(total) - flat(expected)).norm() <= 1e-5 * flat(expected).norm()


def spectral(net: str, keep: float) -> Geometry:
    return make_geometry(Spectral(keep, keep), network(net), SHAPE)


@pairs(at_once=[1, 4, 1000], geometry={"identity": None, "whole": 1.0, "half": 0.5}, clip=CLIPS)
def test_microbatches_change_nothing(at_once, geometry, clip):
    space = spectral("mapped", geometry) if geometry else IDENTITY
    where, weights = points("mapped", 2), QUERIES["both signs"]
    whole = engine("mapped", geometry=space).clipped_sum(where, weights, *batch(), clip)
    split = engine("mapped", torch.float64, at_once, space)
    parts = split.clipped_sum(where, weights, *batch(), clip)
    torch.testing.assert_close(flat(parts), flat(whole), rtol=1e-10, atol=1e-12)


@every_clip
@every_net
def test_batch_of_one_is_that_examples_answer(net, clip):
    where, weights, one = points(net, 2), QUERIES["both signs"], batch(num=1)
    total = engine(net).clipped_sum(where, weights, *one, clip)
    other = VmapEngine(network(net), loss, NUM).clipped_sum(where, weights, *one, clip)
    torch.testing.assert_close(flat(total), flat(other), rtol=1e-10, atol=1e-12)
    assert flat(total).norm() <= clip.clip_norm * (1 + 1e-12)


@pairs(geometry={"identity": None, "half": 0.5}, dtype=[torch.float32, torch.float64], clip=CLIPS)
def test_empty_batch_sums_to_zeros_of_the_right_shapes(geometry, dtype, clip):
    space = spectral("mapped", geometry) if geometry else IDENTITY
    where, nobody = points("mapped", 2, dtype), batch(dtype, num=0)
    total = engine("mapped", dtype, geometry=space).clipped_sum(where, [0.5, 0.5], *nobody, clip)
    full = engine("mapped", dtype, geometry=space).clipped_sum(
        where, [0.5, 0.5], *batch(dtype), clip
    )
    assert {k: x.shape for k, x in total.items()} == {k: x.shape for k, x in full.items()}
    assert (flat(total) == 0).all()


@every_query
def test_without_low_pass_or_clipping_the_restored_sum_is_the_gradient(weights):
    space, where = spectral("mapped", 1.0), points("mapped", len(weights))
    total = engine("mapped", geometry=space).clipped_sum(where, weights, *batch(), Flat(1e9))
    restored = space.restore(Released(total))
    other = VmapEngine(network("mapped"), loss, NUM)
    expected = other.clipped_sum(where, weights, *batch(), Flat(1e9))
    torch.testing.assert_close(flat(restored), flat(expected), rtol=1e-9, atol=1e-9)


@pairs(clip=dict(list(CLIPS.items())[1:]), keep=[1.0, 0.5], weights=QUERIES)
def test_answer_in_a_spectral_space_is_within_the_clip_norm(clip, keep, weights):
    space, where = spectral("mapped", keep), points("mapped", len(weights))
    inputs, targets = batch()
    for i in range(NUM):
        one = (100 * inputs[i : i + 1], targets[i : i + 1])
        total = engine("mapped", geometry=space).clipped_sum(where, weights, *one, clip)
        assert flat(total).norm() <= clip.clip_norm * (1 + 1e-12)


@pytest.mark.parametrize("geometry", [None, 0.5], ids=["identity", "half"])
def test_example_whose_gradient_is_not_finite_counts_as_zero(geometry):
    space = spectral("mapped", geometry) if geometry else IDENTITY
    inputs, targets = batch()
    where, records = points("mapped", 1), engine("mapped", at_once=100, geometry=space)
    whole = flat(records.clipped_sum(where, [1.0], inputs, targets, Flat(0.8)))
    for bad in (math.inf, math.nan):
        spoiled = torch.cat([inputs, torch.full_like(inputs[:1], bad)])
        more = torch.cat([targets, targets[:1]])
        total = flat(records.clipped_sum(where, [1.0], spoiled, more, Flat(0.8)))
        torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weights", [[1.0], [-3.7, 4.7]], ids=["one point", "both signs"])
def test_finite_example_whose_transform_is_not_leaves_no_trace(dtype, weights):
    space, (inputs, targets) = spectral("mapped", 0.5), batch()
    inputs = inputs.to(dtype)
    where = [{k: p.to(dtype) for k, p in x.items()} for x in points("mapped", len(weights))]
    records = BookkeepingEngine(network("mapped").to(dtype), loss, 100, space)
    whole = records.clipped_sum(where, weights, inputs, targets, Flat(0.8))
    for huge in (1e20, 0.99 * torch.finfo(dtype).max):
        spoiled = torch.cat([inputs, torch.full_like(inputs[:1], huge)])
        more = torch.cat([targets, targets[:1]])
        total = flat(records.clipped_sum(where, weights, spoiled, more, Flat(0.8)))
        torch.testing.assert_close(total, flat(whole), rtol=1e-5, atol=1e-5)


def test_the_models_own_tensors_are_neither_read_nor_written():
    where, space = points("mapped", 2), spectral("mapped", 0.5)
    spoiled = engine("mapped", geometry=space)
    for p in spoiled.model.parameters():
        p.data.fill_(math.nan)
    total = spoiled.clipped_sum(where, [0.5, 0.5], *batch(), Flat(1.0))
    sound = engine("mapped", geometry=space).clipped_sum(where, [0.5, 0.5], *batch(), Flat(1.0))
    assert torch.equal(flat(total), flat(sound))
    assert all(p.isnan().all() and p.grad is None for p in spoiled.model.parameters())
    assert not any(module._forward_hooks for module in spoiled.model.modules())


def test_points_and_what_they_hold_are_left_as_they_were():
    where = points("mapped", 2)
    engine("mapped", geometry=spectral("mapped", 0.5)).clipped_sum(
        where, [0.5, 0.5], *batch(), Flat(1.0)
    )
    for point, before in zip(where, points("mapped", 2), strict=True):
        assert torch.equal(flat(point), flat(before))
        assert not any(x.requires_grad or x.grad is not None for x in point.values())


def test_engine_is_chosen_by_the_geometry():
    chosen = make_engine(network("mapped"), loss, spectral("mapped", 0.5), 5, SHAPE)
    assert isinstance(chosen, BookkeepingEngine)
    assert chosen.max_physical_batch == 5
    assert set(chosen.geometry.maps) == {"0.weight", "3.weight", "5.weight"}


class Gated(nn.Module):
    """A layer without a bias, whose output is multiplied by a part of the input."""

    def __init__(self, layer: nn.Module, side: int) -> None:
        super().__init__()
        self.layer, self.side = layer, side

    def forward(self, x_BCHW: Tensor) -> Tensor:
        gate_B = x_BCHW[:, 1:, :1, :1]
        if isinstance(self.layer, nn.Conv2d):
            return (self.layer(x_BCHW[:, :1]) * gate_B).mean((2, 3))
        return (self.layer(x_BCHW[:, 0]) * gate_B[:, 0]).mean(1)


GATED = {
    "positions": lambda: Gated(nn.Linear(4, 4, bias=False), 4),
    "one position": lambda: Gated(nn.Linear(1, 4, bias=False), 1),
    "convolution": lambda: Gated(nn.Conv2d(1, 4, 2, bias=False), 4),
    "same size": lambda: Gated(nn.Conv2d(1, 4, 3, padding=1, bias=False), 4),
    "circulant": lambda: Gated(CirculantLinear(4, 4, 4, bias=False), 4),
    "circulant, one position": lambda: Gated(CirculantLinear(1, 4, 1, bias=False), 1),
}


@pairs(net=list(GATED), clip={"automatic": Automatic(1.0), "flat": Flat(1.0)}, ghost=[True, False])
def test_factor_above_one_makes_no_finite_gradient_infinite(monkeypatch, net, clip, ghost):
    """An output's gradient of 1e38 and an input of 1e-40 make a small gradient."""
    monkeypatch.setattr(PhaseLayout, "cheaper_by_gram", lambda *_: ghost)
    for kind in (OuterProducts, CirculantGradients):
        monkeypatch.setattr(kind, "ghost_norm_is_cheaper", ghost)
    torch.manual_seed(0)
    model = GATED[net]()
    where = [{k: p.detach() for k, p in model.named_parameters()}]
    records = BookkeepingEngine(model, nn.functional.cross_entropy, 100)
    inputs, targets = torch.randn(5, 2, model.side, model.side), torch.arange(5) % 4
    whole = flat(records.clipped_sum(where, [1.0], inputs, targets, clip))
    for gate, size in ((1e38, 1e-42), (1e38, 1e-40), (3e37, 1e-38), (1e37, 1e-37), (1e36, 1e-36)):
        planted = torch.full_like(inputs[:1], size)
        planted[:, 1] = gate
        more = torch.cat([inputs, planted]), torch.cat([targets, targets[:1]])
        moved = flat(records.clipped_sum(where, [1.0], *more, clip)) - whole
        assert moved.norm() <= clip.clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("width", [1, 2, 64, 65])
def test_example_with_a_record_above_the_limit_counts_as_zero_at_one_position_too(width):
    """Torch's norm of a single number does not overflow."""
    torch.manual_seed(0)
    model = nn.Linear(width, 10, bias=False)
    where = [{k: p.detach() for k, p in model.named_parameters()}]
    records = BookkeepingEngine(model, lambda outputs, _: 1e-19 * outputs.sum(), 100)
    planted = torch.zeros(2, width)
    for size, counts in ((9e17, True), (2e18, False), (1e30, False)):
        planted[0, -1] = size
        total = flat(records.clipped_sum(where, [1.0], planted, torch.zeros(2), Flat(0.1)))
        assert (total.norm() > 0) == counts


@pairs(net=["linear", "same size", "circulant"], clip_norm=[1e-6, 1e-4])
def test_factor_times_a_small_gradient_keeps_its_bits_before_a_large_input(
    monkeypatch, net, clip_norm
):
    """An output's gradient of 1e-22 and an input of 1e38 make a gradient that counts."""
    monkeypatch.setattr(PhaseLayout, "cheaper_by_gram", lambda *_: True)
    layers = {
        "linear": lambda: nn.Linear(4, 1024, bias=False),
        "same size": lambda: nn.Conv2d(1, 256, 3, padding=1, bias=False),
        "circulant": lambda: CirculantLinear(4, 1024, 4, bias=False),
    }
    torch.manual_seed(0)
    model = Gated(layers[net](), 4)
    where = [{k: p.detach() for k, p in model.named_parameters()}]
    records = BookkeepingEngine(model, lambda outputs, _: outputs.sum(), 100)
    for size in torch.logspace(37, 38.5, 12):
        for gate in (1e-22, 1e-21, 5e-21):
            planted = torch.full((1, 2, 4, 4), float(size))
            planted[:, 1] = gate
            moved = flat(
                records.clipped_sum(where, [1.0], planted, torch.zeros(1), Flat(clip_norm))
            )
            assert moved.norm() <= clip_norm * (1 + 1e-4)
