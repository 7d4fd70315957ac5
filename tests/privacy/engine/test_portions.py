"""All portions of a batch have one shape, and rows that only fill up are never heard."""

import math
from itertools import pairwise

import pytest
import torch
from oracle import CLIPS, QUERIES, alone, draw, flat, points_of
from pairs import pairs
from torch import nn

from dpsweep.privacy.clip import INSIDE, Flat, Quantile, clipped_sum
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine
from dpsweep.privacy.engine.base import split_microbatches
from dpsweep.privacy.engine.opacus import OpacusEngine

ENGINES = {"bookkeeping": BookkeepingEngine, "vmap": VmapEngine, "opacus": OpacusEngine}
NUM, AT_ONCE = 5, 8
every_engine = pytest.mark.parametrize("engine", ENGINES)
every_size = pytest.mark.parametrize("at_once", [1, 2, 3, 4, 5, 7, 8, 10, 64])
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(18, 4)
        ).double()


def batch(num: int = NUM) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(num, 1, 5, 5, seed=4), torch.arange(num) % 4


def cut(num: int, at_once: int) -> list:
    return list(split_microbatches(torch.arange(num) + 100, torch.arange(num) + 500, at_once))


@every_engine
def test_rounding_of_a_large_microbatch_lets_no_example_through(engine):
    # equal answers up to just below a power of two, then tiny ones, which one example more rounds
    # away in a float32 sum over all of them
    num, many = 4, 2**13
    part = 1 / num**0.5
    large = torch.full((many // 2, num), part)
    large[-1] *= 0.5
    unit = many // 4 * 2.0**-24
    tiny = torch.tensor([1.4, -0.9]).repeat(many // 4)[:, None].expand(-1, num) * unit
    examples = torch.cat([large, tiny])
    one_more = torch.cat([torch.full((1, num), part), examples])
    model = nn.Linear(num, 1, bias=False)
    point = {"weight": model.weight.detach()}

    def asked(inputs: torch.Tensor) -> torch.Tensor:
        found = ENGINES[engine](model, lambda out, _: out.mean(), len(one_more))
        zeros = torch.zeros(len(inputs), dtype=torch.long)
        return found.clipped_sum([point], [1.0], inputs, zeros, Flat(1.0))["weight"]

    moved = (asked(one_more) - asked(examples)).norm().item()
    assert moved < 1.01


@every_size
@pytest.mark.parametrize("num", [1, 2, 3, 6, 7, 13, 64, 65])
def test_each_example_is_there_once_and_in_order(num, at_once):
    parts = cut(num, at_once)
    inputs = torch.cat([part.inputs_B[part.present_B] for part in parts])
    targets = torch.cat([part.targets_B[part.present_B] for part in parts])
    assert inputs.tolist() == [100 + i for i in range(num)]
    assert targets.tolist() == [500 + i for i in range(num)]


@every_size
@pytest.mark.parametrize("num", [1, 2, 3, 6, 7, 13, 64, 65])
def test_the_last_portion_alone_is_filled_up_with_its_own_first_example(num, at_once):
    *whole, last = cut(num, at_once)
    assert len(whole) == (num - 1) // at_once
    assert all(part.present_B.all() for part in whole)
    for part in (*whole, last):
        assert len(part.inputs_B) == len(part.targets_B) == len(part.present_B) == at_once
    absent = ~last.present_B
    assert (last.inputs_B[absent] == last.inputs_B[0]).all()
    assert (last.targets_B[absent] == last.targets_B[0]).all()
    assert last.present_B.tolist() == sorted(last.present_B.tolist(), reverse=True)


@every_engine
@pytest.mark.parametrize("at_once", [2, 3, 4, 5, 8])
def test_other_examples_gradients_do_not_depend_on_how_many_there_are(engine, at_once):
    """In a model that amplifies rounding, as kernels for other numbers of rows round otherwise."""
    torch.manual_seed(0)
    layers = [layer for _ in range(40) for layer in (nn.Linear(32, 32, bias=False), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    point = {k: 3 * 32**-0.5 * torch.randn_like(p) for k, p in model.named_parameters()}
    inputs, targets = torch.randn(14, 32), torch.arange(14) % 4
    found = ENGINES[engine](model, nn.functional.cross_entropy, at_once)

    def asked(num: int) -> torch.Tensor:
        return flat(found.clipped_sum([point], [1.0], inputs[:num], targets[:num], Flat(1.0)))

    sums = [asked(num) for num in range(1, 15)]
    moves = [(more - fewer).norm().item() for fewer, more in pairwise(sums)]
    assert max(moves) < 1 + 1e-5


def test_examples_of_any_shape_are_filled_up():
    inputs, targets = batch()
    (part,) = split_microbatches(inputs, targets, AT_ONCE)
    assert part.inputs_B.shape == (8, 1, 5, 5)
    assert torch.equal(part.inputs_B[7], inputs[0])
    assert part.present_B.tolist() == [True] * 5 + [False] * 3


def test_empty_batch_has_no_portions():
    assert cut(0, 4) == []


@pairs(engine=ENGINES.keys(), weights=QUERIES, clip=CLIPS)
def test_filled_up_rows_are_not_heard(engine, weights, clip):
    model, loss = network(), nn.functional.cross_entropy
    query = (points_of(model, len(weights)), weights, *batch())
    total = ENGINES[engine](model, loss, AT_ONCE).clipped_sum(*query, clip)
    expected = clipped_sum(alone(model, loss, *query), clip)
    torch.testing.assert_close(flat(total), flat(expected), rtol=1e-10, atol=1e-10)


@pairs(engine=ENGINES.keys(), bad=[math.nan, math.inf], clip=CLIPS)
def test_filled_up_rows_are_not_heard_where_they_are_not_finite(engine, bad, clip):
    model, loss = network(), nn.functional.cross_entropy
    inputs, targets = batch()
    inputs[0] = bad  # the example that fills up
    where = points_of(model, 2)
    total = ENGINES[engine](model, loss, AT_ONCE).clipped_sum(
        where, [-3.7, 4.7], inputs, targets, clip
    )
    rest = alone(model, loss, where, [-3.7, 4.7], inputs[1:], targets[1:])
    expected = clipped_sum(rest, clip)
    if isinstance(clip, Quantile):  # an answer that counts as zero lies inside
        expected[INSIDE] += math.sqrt(clip.share) * clip.clip_norm
    torch.testing.assert_close(flat(total), flat(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bound", [1e-6, 1e6], ids=["all outside", "all inside"])
@every_engine
def test_only_examples_that_are_there_are_counted(engine, bound):
    clip = Quantile(bound, share=0.2, quantile=0.5, rate=0.2)
    model = network()
    total = ENGINES[engine](model, nn.functional.cross_entropy, AT_ONCE).clipped_sum(
        points_of(model, 1), [1.0], *batch(), clip
    )
    side = 0.5 if bound > 1 else -0.5
    expected = 2 * math.sqrt(clip.share) * clip.clip_norm * side * NUM
    assert total[INSIDE].item() == pytest.approx(expected)
