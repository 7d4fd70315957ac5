"""Book-keeping and vmap say what plain autograd says, one example at a time, for every layer."""

import math
from functools import cache

import pytest
import torch
from oracle import CLIPS, QUERIES, TOLERANCE, alone, flat, points_of
from pairs import pairs
from torch import nn
from zoo import SHAPE, ZOO, batch, loss, network

from dpsweep.core.types import PerExample
from dpsweep.privacy.clip import INSIDE, Clip, Flat, Quantile, clipped_sum
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine
from dpsweep.privacy.engine.conv import PhaseLayout
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients
from dpsweep.privacy.engine.gradients import OuterProducts

NUM = 9
ENGINES = {"bookkeeping": BookkeepingEngine, "vmap": VmapEngine}
every_net = pytest.mark.parametrize("net", ZOO)
every_query = pytest.mark.parametrize("query", QUERIES)
FORMS = {"by gram": True, "written out": False}
pytestmark = pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule")


@cache
def expected_answers(net: str, query: str, dtype: torch.dtype) -> PerExample:
    model, weights = network(net, dtype), QUERIES[query]
    return alone(model, loss, points_of(model, len(weights)), weights, *batch(NUM, dtype))


def total_of(
    engine: str,
    net: str,
    query: str,
    clip: Clip,
    at_once: int = NUM,
    dtype: torch.dtype = torch.float64,
    num: int = NUM,
) -> dict:
    model, weights = network(net, dtype), QUERIES[query]
    where, (inputs, targets) = points_of(model, len(weights)), batch(NUM, dtype)
    asked = ENGINES[engine](model, loss, at_once)
    return asked.clipped_sum(where, weights, inputs[:num], targets[:num], clip)


def near(total: dict, expected: dict, dtype: torch.dtype = torch.float64) -> None:
    assert total.keys() == expected.keys()
    assert all(x.dtype == torch.float64 for x in total.values())
    tolerance = TOLERANCE[dtype] * flat(expected).norm().item()
    for key, leaf in expected.items():  # each parameter, as none may hide behind a larger one
        assert (total[key] - leaf).norm().item() <= tolerance, key


@pairs(engine=ENGINES.keys(), net=ZOO.keys(), query=QUERIES.keys(), clip=CLIPS)
def test_sum_is_that_of_plain_autograd(engine, net, query, clip):
    expected = clipped_sum(expected_answers(net, query, torch.float64), clip)
    assert flat(expected).norm() > 0.1
    near(total_of(engine, net, query, clip), expected)


@pairs(engine=ENGINES.keys(), net=ZOO.keys(), query=QUERIES.keys())
def test_sum_in_single_precision_is_that_of_plain_autograd(engine, net, query):
    clip, dtype = CLIPS["flat"], torch.float32
    expected = clipped_sum(expected_answers(net, query, dtype), clip)
    near(total_of(engine, net, query, clip, dtype=dtype), expected, dtype)


@pytest.mark.parametrize("gram", FORMS.values(), ids=FORMS)
@every_query
@every_net
def test_form_changes_nothing(monkeypatch, net, query, gram):
    monkeypatch.setattr(PhaseLayout, "cheaper_by_gram", lambda *_: gram)
    monkeypatch.setattr(OuterProducts, "ghost_norm_is_cheaper", gram)
    clip = CLIPS["per layer"]
    expected = clipped_sum(expected_answers(net, query, torch.float64), clip)
    near(total_of("bookkeeping", net, query, clip), expected)


@pairs(net=ZOO.keys(), clip=CLIPS, at_once=[1, 7, 1000])
def test_microbatches_change_nothing(net, clip, at_once):
    expected = clipped_sum(expected_answers(net, "both signs", torch.float64), clip)
    near(total_of("bookkeeping", net, "both signs", clip, at_once), expected)


@pairs(engine=ENGINES.keys(), net=ZOO.keys(), clip=CLIPS)
def test_batch_of_one_is_that_examples_answer(engine, net, clip):
    answer = expected_answers(net, "both signs", torch.float64)
    one = PerExample({k: leaf_B[:1] for k, leaf_B in answer.items()})
    near(total_of(engine, net, "both signs", clip, num=1), clipped_sum(one, clip))


@pairs(
    engine=ENGINES.keys(),
    net=ZOO.keys(),
    clip={name: CLIPS[name] for name in ("flat", "adaptive")},
)
def test_batch_of_none_is_zeros(engine, net, clip):
    total = total_of(engine, net, "both signs", clip, num=0)
    own = {k: p.shape for k, p in network(net).named_parameters()}
    count = {INSIDE: ()} if isinstance(clip, Quantile) else {}
    assert {k: tuple(x.shape) for k, x in total.items()} == own | count
    assert (flat(total) == 0).all()


@pairs(net=[net for net in ZOO if "words" not in net], bad=[math.nan, math.inf], gram=FORMS)
def test_example_that_is_not_finite_counts_as_zero(monkeypatch, net, bad, gram):
    monkeypatch.setattr(PhaseLayout, "cheaper_by_gram", lambda *_: gram)
    monkeypatch.setattr(OuterProducts, "ghost_norm_is_cheaper", gram)
    model, (inputs, targets) = network(net), batch(NUM)
    inputs[2] = bad
    where, weights = points_of(model, 2), QUERIES["both signs"]
    asked = BookkeepingEngine(model, loss, NUM)
    total = asked.clipped_sum(where, weights, inputs, targets, Flat(0.8))
    answer = expected_answers(net, "both signs", torch.float64)
    rest = {k: torch.cat([leaf_B[:2], leaf_B[3:]]) for k, leaf_B in answer.items()}
    near(total, clipped_sum(PerExample(rest), Flat(0.8)))


@every_net
def test_every_net_is_recorded(forgotten, net):
    assert find_wrong_gradients(network(net), loss, SHAPE) is None


@pytest.mark.parametrize("net", ["never called", "without effect"])
def test_layer_that_has_no_effect_answers_with_zero(net):
    total = total_of("bookkeeping", net, "both signs", CLIPS["flat"])
    idle = {k for k in total if not k.startswith("out.")}
    assert idle
    assert all((total[k] == 0).all() for k in idle)
    assert total["out.weight"].norm() > 0


def test_inputs_and_points_are_left_as_they_are():
    class Pass(nn.Module):
        """Hands on the very tensor that it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, inputs_B: torch.Tensor) -> torch.Tensor:
            return inputs_B

    model = nn.Sequential(nn.Flatten(), Pass(), nn.Linear(72, 4, dtype=torch.float64))
    (inputs, targets), where = batch(NUM), points_of(model, 2)
    BookkeepingEngine(model, loss, NUM).clipped_sum(
        where, [0.5, 0.5], inputs, targets, CLIPS["flat"]
    )
    assert torch.equal(inputs, batch(NUM)[0])
    assert not inputs.requires_grad
    assert not any(p.requires_grad for point in where for p in point.values())
