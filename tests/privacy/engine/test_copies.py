"""An example asked as several copies answers once: with the mean of their gradients, clipped."""

import pytest
import torch
from oracle import CLIPS, QUERIES, TOLERANCE, alone, draw, flat, points_of
from pairs import pairs
from torch import nn
from zoo import SHAPE, batch, loss, network

from dpsweep.core.types import PerExample
from dpsweep.privacy.clip import clipped_sum
from dpsweep.privacy.engine import make_engine
from dpsweep.privacy.engine.records import LayerCall, Unrecordable
from dpsweep.privacy.engine.size import choose_batch, estimate_bytes_per_example
from dpsweep.privacy.geometry import IDENTITY

NUM, COPIES = 7, 3
NETS = (
    "convolutions",
    "standardised convolutions",
    "norms",
    "circulant",
    "words",
    "attention",
    "black boxes",
    "shared weight",
    "called twice",
    "never called",
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


def copies() -> torch.Tensor:
    """Three different images of each of NUM examples, shape (B, K, C, H, W)."""
    inputs, _ = batch(NUM)
    return inputs[:, None] + 0.5 * draw(NUM, COPIES, *SHAPE, seed=9)


def expected(net: str, weights: list[float]) -> PerExample:
    """By plain autograd, one copy at a time."""
    model, (_, targets) = network(net), batch(NUM)
    where = points_of(model, len(weights))
    each = [alone(model, loss, where, weights, x, targets) for x in copies().unbind(1)]
    return PerExample({k: torch.stack([a[k] for a in each]).mean(0) for k in each[0]})


@pairs(choice=["bookkeeping", "vmap"], net=NETS, query=QUERIES.keys(), clip=CLIPS)
def test_answer_is_the_mean_over_copies_clipped_once(choice, net, query, clip):
    model, weights = network(net), QUERIES[query]
    engine = make_engine(model, loss, IDENTITY, 4, SHAPE, choice, copies=COPIES)
    where = points_of(model, len(weights))
    total = engine.clipped_sum(where, weights, copies(), batch(NUM)[1], clip)
    right = clipped_sum(expected(net, weights), clip)
    tolerance = TOLERANCE[torch.float64] * flat(right).norm().item()
    for key, leaf in right.items():
        assert (total[key] - leaf).norm().item() <= tolerance, key


def test_opacus_hooks_answer_for_copies_too():
    model, weights = network("convolutions").double(), QUERIES["both signs"]
    model[0].padding_mode = "zeros"  # the other is one that Opacus overlooks
    where, clip = points_of(model, 2), CLIPS["flat"]
    asked = [
        make_engine(model, loss, IDENTITY, 4, SHAPE, choice, copies=COPIES).clipped_sum(
            where, weights, copies(), batch(NUM)[1], clip
        )
        for choice in ("opacus", "vmap")
    ]
    for key, leaf in asked[1].items():
        torch.testing.assert_close(asked[0][key], leaf, rtol=1e-8, atol=1e-10)


def test_copies_that_are_all_alike_answer_like_one():
    model, (inputs, targets) = network("convolutions"), batch(NUM)
    where, clip = points_of(model, 1), CLIPS["flat"]
    one = make_engine(model, loss, IDENTITY, 4, SHAPE)
    three = make_engine(model, loss, IDENTITY, 4, SHAPE, copies=COPIES)
    same = inputs[:, None].expand(NUM, COPIES, *SHAPE)
    expected = one.clipped_sum(where, [1.0], inputs, targets, clip)
    for key, leaf in three.clipped_sum(where, [1.0], same, targets, clip).items():
        torch.testing.assert_close(leaf, expected[key], rtol=1e-10, atol=1e-12)


def test_input_without_the_rows_of_the_output_cannot_be_parted():
    use = LayerCall(1.0, (torch.zeros(4, 2), torch.zeros(5, 2)), torch.zeros(4, 2), {})
    with pytest.raises(Unrecordable, match="does not have the rows of its output"):
        use.split_copies(2)
    first, second = LayerCall(3.0, (torch.arange(4), None), torch.arange(4.0), {}).split_copies(2)
    assert (first.weight, second.weight) == (1.5, 1.5)
    assert second.inputs[0].tolist() == [2, 3]
    assert second.inputs[1] is None
    assert first.grad.tolist() == [0.0, 1.0]


def test_memory_of_activations_grows_with_the_copies_and_that_of_gradients_does_not():
    model = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(72, 4))
    one, two, five = (estimate_bytes_per_example(model, SHAPE, "vmap", k) for k in (1, 2, 5))
    assert five - one == 4 * (two - one) > 0
    assert (
        choose_batch(model, SHAPE, 1000, "vmap", 8) < 100 < choose_batch(model, SHAPE, 1000, "vmap")
    )
