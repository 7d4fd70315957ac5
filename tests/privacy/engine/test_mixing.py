"""A model that lets one example hear of another, or of those before, is found."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zoo import SHAPE, Net, Words, loss

from dpsweep.privacy.engine.doubt import reason_to_doubt

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "mean of many": lambda x: x - x.mean(0) * (len(x) > 2),
    "order": lambda x: x.roll(1, 0),
    "order of many": lambda x: x.roll(1, 0) if len(x) > 2 else x,
    "what is not a number": lambda x: x + 0 * x.sum(),
    "what is large": lambda x: x * (x.detach().nan_to_num().abs().amax() < 1e20),
    "what is zero": lambda x: x * (x.detach() != 0).flatten(1).any(1).all(),
}
every_mixing = pytest.mark.parametrize("kind", MIXING)


@every_mixing
def test_examples_that_hear_of_each_other_are_found_before_a_layer(kind):
    net = Net(lambda net, x: net.layer(MIXING[kind](x.flatten(1))), layer=nn.Linear(72, 4))
    found = reason_to_doubt(net, loss, SHAPE)
    assert found is not None
    assert re.search("hear of each other, as layer 'layer' shows|not what was recorded", found)


@pytest.mark.parametrize(
    "kind",
    ["mean", "mean of many", "order", "order of many", "what is not a number", "what is large"],
)
def test_examples_that_hear_of_each_other_are_found_behind_all_layers(kind):
    net = Net(lambda net, x: MIXING[kind](net.layer(x.flatten(1))), layer=nn.Linear(72, 4))
    assert reason_to_doubt(net, loss, SHAPE) is not None


def test_layer_with_a_memory_of_its_own_is_refused():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().sum()
            return x

    net = nn.Sequential(Counting(), nn.Flatten(), nn.Linear(72, 4))
    with pytest.raises(ValueError, match=r"buffer '0.seen' changes when it is called"):
        reason_to_doubt(net, loss, SHAPE)
    assert net[0].seen == 0


def test_layer_that_changes_its_weights_when_called_is_refused():
    net = nn.Sequential(Words(), nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(36, 4))
    before = net[1].weight.clone()
    with pytest.raises(ValueError, match=r"parameter '1.weight' changes when it is called"):
        reason_to_doubt(net, loss, SHAPE)
    assert torch.equal(net[1].weight, before)


def test_examples_that_are_alone_are_not_found():
    net = Net(lambda net, x: net.layer(x.flatten(1)).cumsum(1), layer=nn.Linear(72, 4))
    assert reason_to_doubt(net, loss, SHAPE) is None
