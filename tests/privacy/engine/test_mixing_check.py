"""A model that lets one example hear of another, or of those before, is found."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zoo import SHAPE, Net, Words, loss

from dpsweep.core.errors import ConfigError
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine, make_engine
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
    with pytest.raises(ValueError, match=r"examples mix in batches of 24"):
        make_engine(net, loss, IDENTITY, 24, SHAPE, choice)
    with pytest.raises(ValueError, match=r"examples mix in batches of 24.* train\.engine: vmap"):
        make_engine(net, loss, IDENTITY, 24, SHAPE)
    assert type(make_engine(net, loss, IDENTITY, 24, SHAPE, "vmap")) is VmapEngine


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "weights of each row": lambda x: x * (1 + torch.arange(len(x)) // 4 % 3)[:, None],
    "positions along the wrong axis": lambda x: x + torch.linspace(-9, 9, 24)[: len(x), None] ** 3,
    "number of rows": lambda x: x * (1 if len(x) < 12 else 0.5),
    "number of many rows": lambda x: x * (1 if len(x) < 20 else 0.5),
}


@pytest.mark.parametrize("kind", PLACES)
def test_outputs_that_change_with_their_place_or_the_number_of_rows_are_found(kind, forgotten):
    net = Net(lambda net, x: PLACES[kind](net.layer(x.flatten(1))), layer=nn.Linear(72, 4))
    found = find_mixing_sizes(net, SHAPE, [6, 12, 18, 24])
    assert re.match("examples mix, as outputs that .* among .* rows show", found)
    with pytest.raises(ValueError, match=r"examples mix, as outputs .* train\.engine: vmap"):
        make_engine(net, loss, IDENTITY, 24, SHAPE)
    assert type(make_engine(net, loss, IDENTITY, 24, SHAPE, "vmap")) is VmapEngine


class Backward(torch.autograd.Function):
    """Changes gradients, and no output."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of many": lambda g: g - g.mean(0) if len(g) > 8 else g,
    "place": lambda g: g * (1 + torch.arange(len(g)) // 8)[:, None],
    "number of rows": lambda g: g * (1 if len(g) < 20 else 0.5),
    "what is large": lambda g: g * (g.abs().max() if len(g) > 8 else 1),
}


@pytest.mark.parametrize("kind", BACKWARD)
def test_what_backward_passes_of_large_batches_alone_mix_is_found(kind, forgotten):
    def run(net, x):
        return net.out(Backward.apply(net.layer(x.flatten(1)), BACKWARD[kind]))

    net = Net(run, layer=nn.Linear(72, 5), out=nn.Linear(5, 4))
    assert find_wrong_gradients(net, loss, SHAPE) is None, "not in small ones"
    assert find_mixing_sizes(net, SHAPE, [6, 24]) is None, "not in outputs"
    with pytest.raises(ValueError, match="examples mix, as layer 'layer' shows, whose records"):
        make_engine(net, loss, IDENTITY, 24, SHAPE)


def test_one_example_of_a_batch_of_places_moved_the_sum_by_more_than_the_clip_norm():
    """What the check is for: without it, everyone behind that example has another gradient."""

    def alternate(x):
        return x * (1 - 2 * (torch.arange(len(x)) % 2))[:, None]

    net = Net(lambda net, x: alternate(net.layer(x)), layer=nn.Linear(8, 4))
    rng = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(24, 8, generator=rng), torch.arange(24) % 4
    engine, point = BookkeepingEngine(net, loss, 24), dict(net.named_parameters())
    sums = [
        torch.cat([g.flatten() for g in engine.clipped_sum([point], [1.0], *part).values()])
        for part in ((inputs, targets, Flat(0.1)), (inputs[1:], targets[1:], Flat(0.1)))
    ]
    assert (sums[0] - sums[1]).norm() > 1.5 * 0.1


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
