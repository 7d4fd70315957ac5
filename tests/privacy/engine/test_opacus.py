"""Opacus' gradients, clipped and summed by ours, are those of the other engines."""

import math
from collections.abc import Callable

import pytest
import torch
from oracle import CLIPS, QUERIES, TOLERANCE, flat, points_of
from pairs import pairs
from test_mixing_check import MIXING
from torch import nn
from zoo import SHAPE, ZOO, Net, Words, batch, loss

from dpsweep.core.types import Tensors
from dpsweep.privacy.clip import INSIDE, Clip, Flat, Quantile
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine, make_engine
from dpsweep.privacy.engine.opacus import OpacusEngine, find_unsupported_setting
from dpsweep.privacy.geometry import IDENTITY

NUM = 9
every_clip = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
NETS: dict[str, Callable[[], nn.Module]] = {
    name: ZOO[name]
    for name in (
        *("linear over positions", "circulant", "tied words", "shared weight"),
        *("called twice", "never called", "without effect"),
    )
} | {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, (3, 2), stride=(1, 2), groups=2, bias=False),
        nn.Conv2d(6, 6, 2, dilation=2, padding=1, groups=6),
        nn.Flatten(),
        nn.Linear(72, 4),
    ),
    "norms": lambda: nn.Sequential(
        nn.LayerNorm((6, 6)), nn.GroupNorm(1, 2), nn.LayerNorm(6), nn.Flatten(), nn.Linear(72, 4)
    ),
    "words": lambda: nn.Sequential(
        Words(), nn.Embedding(7, 4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 4)
    ),
    "black box": lambda: nn.Sequential(nn.PReLU(2), nn.Flatten(), nn.Linear(72, 4)),
}


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(72, 4))
    net[1].register_forward_hook(lambda layer, args, output: output * 3)
    return net


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "examples that hear of each other": (
        lambda: Net(lambda net, x: net.layer((x - x.mean(0)).flatten(1)), layer=nn.Linear(72, 4)),
        "the gradient of 'layer.weight' is not that of autograd",
    ),
    "padding by reflection": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten()),
        r"it overlooks padding_mode='reflect' of layer '0' \(Conv2d\)",
    ),
    "padding that does not learn": (
        lambda: nn.Sequential(Words(), nn.Embedding(7, 4, padding_idx=0), nn.Flatten()),
        r"it overlooks padding_idx=0 of layer '1' \(Embedding\)",
    ),
    "hook of another's": (
        hooked,
        "the gradient of '1.weight' is not that of autograd",
    ),
}
"""What Opacus answers wrongly, without a word; and what is said of it."""

every_net = pytest.mark.parametrize("net", NETS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]


def network(net: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        make = NETS[net] if net in NETS else UNKNOWN[net][0]
        return make().to(dtype)


def totals(
    net: str,
    weights: list[float],
    clip: Clip,
    at_once: int = NUM,
    num: int = NUM,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensors, Tensors]:
    """What Opacus and vmap say."""
    inputs, targets = batch(NUM, dtype)
    where = points_of(network(net, dtype), len(weights))
    query = (where, weights, inputs[:num], targets[:num], clip)
    return tuple(
        engine(network(net, dtype), loss, at_once).clipped_sum(*query)
        for engine in (OpacusEngine, VmapEngine)
    )


def agree(ours: Tensors, theirs: Tensors, dtype: torch.dtype = torch.float64) -> None:
    assert {k: (x.shape, x.dtype) for k, x in ours.items()} == {
        k: (x.shape, x.dtype) for k, x in theirs.items()
    }
    assert (flat(ours) - flat(theirs)).norm() <= TOLERANCE[dtype] * flat(theirs).norm()


@pairs(net=NETS.keys(), weights=QUERIES, clip=CLIPS, at_once=[1, 7, NUM, 1000])
def test_sum_is_that_of_vmap_in_any_microbatches(net, weights, clip, at_once):
    agree(*totals(net, weights, clip, at_once))


@every_net
def test_single_precision_is_that_of_vmap(net):
    agree(*totals(net, QUERIES["both signs"], CLIPS["flat"], dtype=torch.float32), torch.float32)


@pytest.mark.parametrize("num", [0, 1])
@every_clip
def test_batch_may_hold_one_example_or_none(clip, num):
    ours, theirs = totals("convolutions", QUERIES["both signs"], clip, num=num)
    agree(ours, theirs)
    assert (INSIDE in ours) == isinstance(clip, Quantile)
    assert (flat(ours) == 0).all() == (num == 0)


def test_example_that_is_not_finite_counts_as_zero():
    inputs, targets = batch(NUM)
    inputs[2] = math.nan
    where = points_of(network("convolutions"), 2)
    ours = OpacusEngine(network("convolutions"), loss, NUM)
    theirs = VmapEngine(network("convolutions"), loss, NUM)
    query = (where, QUERIES["both signs"], inputs, targets, Flat(0.8))
    agree(ours.clipped_sum(*query), theirs.clipped_sum(*query))


def test_given_model_is_left_untouched():
    model = network("convolutions")
    where, before = points_of(model, 2), {k: p.clone() for k, p in model.named_parameters()}
    engine = OpacusEngine(model, loss, NUM)
    for _ in range(2):
        engine.clipped_sum(where, QUERIES["both signs"], *batch(NUM), Flat(0.8))
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key])
        assert p.grad is None
        assert not hasattr(p, "grad_sample")
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks
    assert not any(p.requires_grad for point in where for p in point.values())


def test_models_own_tensors_are_not_read():
    model, query = network("convolutions"), (QUERIES["both signs"], *batch(NUM), Flat(0.8))
    where = points_of(model, 2)
    expected = OpacusEngine(network("convolutions"), loss, NUM).clipped_sum(where, *query)
    for p in model.parameters():
        p.data.fill_(math.nan)
    total = OpacusEngine(model, loss, NUM).clipped_sum(where, *query)
    assert torch.equal(flat(total), flat(expected))


def test_queries_in_turn_do_not_hear_of_each_other():
    engine = OpacusEngine(network("called twice"), loss, NUM)
    first, second = points_of(engine.model, 2)
    asked = [engine.clipped_sum([p], [1.0], *batch(NUM), Flat(0.8)) for p in (first, second, first)]
    assert torch.equal(flat(asked[0]), flat(asked[2]))
    assert not torch.equal(flat(asked[0]), flat(asked[1]))


@pytest.mark.parametrize("net", UNKNOWN)
def test_layer_that_opacus_answers_wrongly_is_refused(net):
    ours, theirs = totals(net, [1.0], Flat(1e6))
    assert (flat(ours) - flat(theirs)).norm() > 1e-3 * flat(theirs).norm()
    _, why = UNKNOWN[net]
    with pytest.raises(
        ValueError, match=f"Opacus does not answer rightly for it: {why}.* Use auto"
    ):
        make_engine(network(net), loss, IDENTITY, NUM, SHAPE, "opacus")


@every_net
def test_layer_that_opacus_answers_rightly_is_not_refused(net):
    for dtype in (torch.float32, torch.float64):
        engine = make_engine(network(net, dtype), loss, IDENTITY, NUM, SHAPE, "opacus")
        assert isinstance(engine, OpacusEngine)


@pytest.mark.parametrize("kind", ["mean of many", "order", "order of many", "what is not a number"])
@pytest.mark.parametrize("where", ["before", "behind"])
def test_examples_that_hear_of_each_other_are_found_by_its_gradients(where, kind):
    mix = MIXING[kind]
    mixed = {
        "before": lambda net, x: net.layer(mix(x.flatten(1))),
        "behind": lambda net, x: mix(net.layer(x.flatten(1))),
    }
    net = Net(mixed[where], layer=nn.Linear(72, 4))
    with pytest.raises(ValueError, match=r"examples mix|is not that of autograd"):
        make_engine(net, loss, IDENTITY, NUM, SHAPE, "opacus")


@pytest.mark.usefixtures("forgotten")
def test_kind_that_is_known_is_tried_once_and_apart_from_bookkeeping(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "dpsweep.privacy.engine.find_wrong_gradients", lambda *given: asked.append(given[3])
    )
    for choice in ("opacus", "auto", "opacus", "auto"):
        make_engine(network("norms"), loss, IDENTITY, NUM, SHAPE, choice, kind="norms")
    assert asked == [OpacusEngine, BookkeepingEngine]


@pytest.mark.usefixtures("forgotten")
def test_kind_that_is_known_is_tried_again_for_larger_batches(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "dpsweep.privacy.engine.find_mixing_sizes", lambda *given: asked.append(given[-1])
    )
    for num in (9, 8, 9, 10, 4):
        make_engine(network("norms"), loss, IDENTITY, num, SHAPE, "auto", kind="norms", copies=2)
    assert asked == [[5, 18], [5, 20]]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(2, 2, 1, padding_mode="circular"),
        nn.EmbeddingBag(3, 2, max_norm=1.0),
        nn.Embedding(3, 2, padding_idx=0),
        nn.Embedding(3, 2, scale_grad_by_freq=True),
    ],
    ids=repr,
)
def test_setting_that_opacus_overlooks_is_found_where_no_image_would_show_it(layer):
    found = find_unsupported_setting(nn.Sequential(nn.Linear(2, 2), layer))
    assert found is not None
    assert "of layer '1'" in found
    assert find_unsupported_setting(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Embedding(3, 2))) is None


@pytest.mark.parametrize("key", ["padding_idx", "max_norm"])
def test_setting_of_a_frozen_layer_counts_only_where_it_changes_the_weight(key):
    layer = nn.Embedding(3, 2, **{key: 1})
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)  # as frozen parameters are kept
    found = find_unsupported_setting(nn.Sequential(layer, nn.Linear(2, 2)))
    assert (found is None) == (key == "padding_idx")
