"""A model that lets one example hear of another, or of those before, is found."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zoo import SHAPE, Net, Words, loss

from dpsweep.core.errors import ConfigError
from dpsweep.privacy.engine import VmapEngine, make_engine
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients
from dpsweep.privacy.engine.mixing_check import find_mixing_sizes
from dpsweep.privacy.engine.state_guard import check_stateless
from dpsweep.privacy.geometry import IDENTITY

MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "mean of many": lambda x: x - x.mean(0) * (len(x) > 2),
    "order": lambda x: x.roll(1, 0),
    "order of many": lambda x: x.roll(1, 0) if len(x) > 2 else x,
    "what is not a number": lambda x: x + 0 * x.sum(),
    "what is large": lambda x: x * (x.detach().nan_to_num().abs().amax() < 1e20),
    "what is turned round": lambda x: _turned(x, x.roll(1, 0)),
    "what is zero": lambda x: x * (x.detach() != 0).flatten(1).any(1).all(),
}
every_mixing = pytest.mark.parametrize("kind", MIXING)


@every_mixing
def test_examples_that_hear_of_each_other_are_found_before_a_layer(kind):
    net = Net(lambda net, x: net.layer(MIXING[kind](x.flatten(1))), layer=nn.Linear(72, 4))
    found = find_wrong_gradients(net, loss, SHAPE)
    assert found is not None
    assert re.search("examples mix, as layer 'layer' shows|is not that of autograd", found)


@pytest.mark.parametrize(
    "kind",
    ["mean", "mean of many", "order", "order of many", "what is not a number", "what is large"],
)
def test_examples_that_hear_of_each_other_are_found_behind_all_layers(kind):
    net = Net(lambda net, x: MIXING[kind](net.layer(x.flatten(1))), layer=nn.Linear(72, 4))
    assert find_wrong_gradients(net, loss, SHAPE) is not None


LARGE_BATCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "statistics of many": lambda x: (x - x.mean(0)) / x.std(0) if len(x) >= 16 else x,
    "frames of a clip": lambda x: torch.cat([x[:8], x[8:] + x[8:].roll(-2, 0).detach()]),
    "the other end": lambda x: x + x.flip(0).detach() if len(x) > 8 else x,
    "signs": lambda x: x * x.flip(0).detach().sum(1).sign()[:, None] if len(x) > 8 else x,
    "turned round": lambda x: _turned(x, x.flip(0).detach()) if len(x) > 8 else x,
}


def _turned(x: Tensor, other: Tensor) -> Tensor:
    """The same numbers in another order, as the other says."""
    return torch.where(other.sum(1, keepdim=True) > 0, x.roll(1, 1), x)


@pytest.mark.parametrize("kind", LARGE_BATCHES)
def test_examples_that_hear_of_each_other_in_large_batches_are_found(kind):
    net = Net(lambda net, x: LARGE_BATCHES[kind](net.layer(x.flatten(1))), layer=nn.Linear(72, 4))
    assert find_wrong_gradients(net, loss, SHAPE) is None, "not in small ones"
    found = find_mixing_sizes(net, SHAPE, [6, 24])
    assert found == "examples mix in batches of 24"
    assert find_mixing_sizes(net, SHAPE, [6, 8]) is None


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("choice", ["bookkeeping", "opacus"])
def test_engines_are_not_asked_with_batches_in_which_examples_are_heard(choice):
    net = Net(
        lambda net, x: LARGE_BATCHES["signs"](net.layer(x.flatten(1))), layer=nn.Linear(72, 4)
    )
    make_engine(net, loss, IDENTITY, 8, SHAPE, choice)
    with pytest.raises(ValueError, match=r"examples mix in batches of 12"):
        make_engine(net, loss, IDENTITY, 24, SHAPE, choice)
    with pytest.raises(ValueError, match=r"examples mix in batches of 12.* train\.engine: vmap"):
        make_engine(net, loss, IDENTITY, 24, SHAPE)
    assert type(make_engine(net, loss, IDENTITY, 24, SHAPE, "vmap")) is VmapEngine


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_model_with_a_coarse_activation_is_tried_like_others(kind):
    net = Net(lambda net, x: net.layer(x.flatten(1).to(kind).float()), layer=nn.Linear(72, 4))
    assert find_wrong_gradients(net, loss, SHAPE) is None
    assert find_mixing_sizes(net, SHAPE, [6, 24]) is None


def test_a_large_batch_of_a_sound_model_does_not_mix():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(48, 4))
    assert find_mixing_sizes(net, SHAPE, [6, 24]) is None


def test_memory_that_runs_out_says_nothing_of_the_model():
    def full(net: Net, x: Tensor) -> Tensor:
        if len(x) > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return net.layer(x.flatten(1))

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        find_mixing_sizes(Net(full, layer=nn.Linear(72, 4)), SHAPE, [6, 24])


class Counting(nn.Module):
    """Remembers what it saw: always, or only while it learns."""

    def __init__(self, *, only_learning: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.only_learning = only_learning

    def forward(self, x: Tensor) -> Tensor:
        if not self.only_learning or (self.training and torch.is_grad_enabled()):
            self.seen += x.detach().sum()
        return x


@pytest.mark.parametrize("only_learning", [False, True])
def test_layer_with_a_memory_of_its_own_is_refused(only_learning):
    net = nn.Sequential(Counting(only_learning=only_learning), nn.Flatten(), nn.Linear(72, 4))
    with pytest.raises(ConfigError, match=r"buffer 'seen' of module '0' \(Counting\) (cha|depe)"):
        check_stateless(net, SHAPE)
    assert net[0].seen == 0


def test_layer_that_changes_its_weights_when_called_is_refused():
    net = nn.Sequential(Words(), nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(36, 4))
    before = net[1].weight.clone()
    with pytest.raises(ConfigError, match=r"parameter '1.weight' changes when the model is called"):
        check_stateless(net, SHAPE)
    assert torch.equal(net[1].weight, before)


def test_examples_that_are_alone_are_not_found():
    net = Net(lambda net, x: net.layer(x.flatten(1)).cumsum(1), layer=nn.Linear(72, 4))
    assert find_wrong_gradients(net, loss, SHAPE) is None
