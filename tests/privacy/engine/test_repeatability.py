"""A model with other answers to the same images is refused; rounding on a GPU is no memory."""

import math
from collections.abc import Callable

import pytest
import remembering
import torch
from torch import Tensor, nn
from zoo import CLASSES, SHAPE, ZOO, Net, loss, network

from dpsweep.core.errors import ConfigError
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine, make_engine, repeatability
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients
from dpsweep.privacy.engine.mixing_check import find_mixing_sizes
from dpsweep.privacy.engine.repeatability import Probe, check_repeats, relative_difference
from dpsweep.privacy.geometry import IDENTITY

pytestmark = [
    pytest.mark.usefixtures("forgotten"),
    pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule"),
]
AGAIN = "gives another answer when it is asked the same again"
every_engine = pytest.mark.parametrize("choice", ["auto", "bookkeeping", "vmap", "opacus"])


def closed(change: Callable[[int], float]) -> nn.Module:
    """A model whose outputs are scaled by a function of the number of calls, in a closure."""
    calls = [0]

    def forward(net: Net, x: Tensor) -> Tensor:
        calls[0] += 1
        return net.layer(x.flatten(1)) * change(calls[0])

    return Net(forward, layer=nn.Linear(72, 4))


def jittering(size: float) -> nn.Module:
    """As a GPU's kernels that add in an order of their own: another rounding in each pass."""

    def forward(net: Net, x: Tensor) -> Tensor:
        out = net.layer(x.flatten(1))
        return out + size * torch.rand(out.shape)

    return Net(forward, layer=nn.Linear(72, 4))


@every_engine
def test_model_whose_answers_depend_on_the_number_of_calls_is_refused(choice):
    with pytest.raises(ConfigError, match=AGAIN):
        make_engine(closed(lambda calls: 1 / (1 + 0.01 * calls)), loss, IDENTITY, 2, SHAPE, choice)


@every_engine
def test_model_that_draws_at_random_is_refused(choice):
    with pytest.raises(ConfigError, match=AGAIN):
        make_engine(jittering(1e-3), loss, IDENTITY, 2, SHAPE, choice)


def test_a_memory_is_not_called_mixing():
    model = closed(lambda calls: 1 + 1e-6 * (calls > 1))  # from the second pass on
    with pytest.raises(ConfigError, match=AGAIN):
        find_mixing_sizes(model, SHAPE, [6, 24])


@pytest.fixture
def gpu_rounding(monkeypatch):
    """Passes may differ as on a GPU."""
    monkeypatch.setattr(repeatability, "_allowed_rounding", lambda *_: 1e-5)


@pytest.mark.usefixtures("gpu_rounding")
def test_a_kernel_that_rounds_otherwise_each_time_is_not_called_mixing_nor_a_memory():
    model = jittering(1e-7)
    assert find_wrong_gradients(model, loss, SHAPE) is None
    assert find_mixing_sizes(model, SHAPE, [6, 24]) is None
    assert type(make_engine(model, loss, IDENTITY, 8, SHAPE)) is BookkeepingEngine


@pytest.mark.usefixtures("gpu_rounding")
def test_mixing_is_found_in_spite_of_such_a_kernel():
    def forward(net: Net, x: Tensor) -> Tensor:
        out = net.layer((x - 0.01 * x.mean(0) * (len(x) > 2)).flatten(1))
        return out + 1e-7 * torch.rand(out.shape)

    model = Net(forward, layer=nn.Linear(72, 4))
    assert find_wrong_gradients(model, loss, SHAPE) == "examples mix, as layer 'layer' shows"
    assert find_mixing_sizes(model, SHAPE, [6, 24]) == "examples mix in batches of 6"


@pytest.mark.usefixtures("gpu_rounding")
def test_memory_is_found_in_spite_of_such_a_kernel():
    with pytest.raises(ConfigError, match=AGAIN):
        find_wrong_gradients(closed(lambda calls: 1 + 1e-3 * calls), loss, SHAPE)


def test_wrong_gradients_of_vmap_are_an_error_and_no_way_out():
    """A model that is another one within vmap."""

    def forward(net: Net, x: Tensor) -> Tensor:
        within = torch._C._functorch.is_functorch_wrapped_tensor(x)
        return net.layer(x.flatten(1)) * (2.0 if within else 1.0)

    model = Net(forward, layer=nn.Linear(72, 4))
    assert find_wrong_gradients(model, loss, SHAPE, VmapEngine) == (
        "the gradient of 'layer.weight' is not that of autograd, one example at a time"
    )
    with pytest.raises(ValueError, match=r"vmap cannot compute it one example at a time \(the gr"):
        make_engine(model, loss, IDENTITY, 2, SHAPE, "vmap")


@pytest.mark.parametrize("net", ZOO)
def test_probe_of_a_sound_net_is_answered_the_same(net):
    model = network(net)
    probe = Probe.of(model, SHAPE)
    draws = torch.get_rng_state()
    for _ in range(3):
        probe.check()
    assert torch.equal(torch.get_rng_state(), draws)


def test_probe_finds_a_memory_that_began_after_it():
    model = remembering.elsewhere(SHAPE, CLASSES, after=10)
    probe = Probe.of(model, SHAPE)
    probe.check()
    for _ in range(20):
        model(torch.ones(3, *SHAPE))
    with pytest.raises(ConfigError, match=AGAIN):
        probe.check()


def test_difference_is_of_all_tensors_together():
    one = [torch.tensor([4.0, math.nan, math.inf]), torch.tensor([0.001])]
    assert relative_difference(one, one) == 0.0
    assert relative_difference(one, [one[0], torch.tensor([0.002])]) == pytest.approx(0.00025)
    assert relative_difference(one, [torch.tensor([4.0, 1.0, math.inf]), one[1]]) == math.inf
    assert relative_difference(one, one[:1]) == math.inf
    assert relative_difference([torch.ones(2)], [torch.ones(3)]) == math.inf
    assert relative_difference([torch.zeros(2)], [torch.tensor([0.0, 1e-9])]) == 1.0


def test_on_a_cpu_one_bit_is_a_difference():
    one = torch.ones(3)
    assert check_repeats([one], [one.clone()], torch.float32) == 0.0
    with pytest.raises(ConfigError, match=AGAIN):
        check_repeats([one], [one.nextafter(torch.tensor(2.0))], torch.float32)
