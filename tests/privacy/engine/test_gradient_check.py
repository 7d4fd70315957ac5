"""A model whose records would not be true is found before its first step."""

import re
from collections.abc import Callable

import pytest
import torch
from oracle import draw, flat, points_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import SHAPE, Gate, Net, loss

from dpsweep.core.errors import ConfigError
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine, make_engine
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients
from dpsweep.privacy.geometry import IDENTITY

pytestmark = [
    pytest.mark.usefixtures("forgotten"),
    pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule"),
]


def linear(outputs: int = 4, inputs: int = 72, **options) -> nn.Linear:
    return nn.Linear(inputs, outputs, **options)


def without_gradients(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = net.layer(x.flatten(1))
    return net.out(hidden)


def changed_input(net: Net, x: Tensor) -> Tensor:
    given = x.flatten(1).sin()
    output = net.layer(given)
    given.mul_(2)
    return output


def tied_box() -> nn.Module:
    class Box(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight, self.scale = weight, nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x @ self.weight

    layer = linear(72)
    return Net(lambda net, x: net.box(net.layer(x.flatten(1))), layer=layer, box=Box(layer.weight))


def hooked() -> nn.Module:
    """A hook that another has put on a layer, before ours."""
    net = nn.Sequential(nn.Flatten(), linear(5), nn.Tanh(), linear(4, 5))
    net[1].register_forward_hook(lambda layer, args, output: output * 3)
    return net


class Pair(nn.Linear):
    """Hands on two tensors."""

    def __init__(self) -> None:
        super().__init__(72, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


def rejoined() -> nn.Module:
    inner = nn.Linear(6, 6)
    return Net(
        lambda net, x: net.out(net.second(net.first(x[:, 0]).sin()).flatten(1)),
        first=nn.Sequential(inner),
        second=nn.Sequential(inner),
        out=linear(4, 36),
    )


def borrowed() -> nn.Module:
    """The layer's calls within the box are counted twice."""
    box = Gate()
    return Net(
        lambda net, x: net.beside[0](net.box(x[:, 0], x[:, 1]).sin()),
        box=box,
        beside=nn.Sequential(box.inner),
    )


FALSE = {  # a model, and what is said of it
    "in place, after a layer that begins": (
        lambda: nn.Sequential(nn.Flatten(), linear(8), nn.ReLU(inplace=True), linear(4, 8)),
        "RuntimeError: .* in-place operation",
    ),
    "in place, after a layer in the midst": (
        lambda: nn.Sequential(
            nn.Flatten(), linear(8), linear(8, 8), nn.ReLU(inplace=True), linear(4, 8)
        ),
        "gradient of '2.weight' is not that of autograd",
    ),
    "weight used elsewhere": (
        lambda: Net(
            lambda net, x: net.layer(x.flatten(1)) + x.flatten(1).sin() @ net.layer.weight.T,
            layer=linear(),
        ),
        "gradient of 'layer.weight' is not that of autograd",
    ),
    "handed no examples": (
        lambda: Net(lambda net, x: x.flatten(1) @ net.layer(torch.eye(72).to(x)), layer=linear()),
        "Unrecordable: layer 'layer' does not hand on one tensor of all the examples",
    ),
    "handed as many rows as there are examples": (
        lambda: Net(
            lambda net, x: x.flatten(1)[:, :2].exp() @ net.layer(torch.eye(2, 3).to(x)).sin(),
            layer=linear(inputs=3),
        ),
        "gradient of 'layer.weight' is not that of autograd",
    ),
    "length before examples": (
        lambda: Net(
            lambda net, x: net.layer(x.flatten(1, 2).transpose(0, 1)).sum(0), layer=linear(4, 6)
        ),
        "Unrecordable: layer 'layer'",
    ),
    "two examples' worth of length before examples": (
        lambda: Net(
            lambda net, x: net.layer(x[:, :, 0].transpose(0, 1)).sin().cumsum(0)[-1],
            layer=linear(4, 6),
        ),
        "gradient of 'layer.weight' is not that of autograd",
    ),
    "parametrized, no bias": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.utils.parametrizations.weight_norm(linear(bias=False))
        ),
        "Unrecordable: layer '1.parametrizations.weight'",
    ),
    "given by name": (
        lambda: Net(lambda net, x: net.layer(input=x.flatten(1)), layer=linear()),
        "IndexError",
    ),
    "under no_grad": (
        lambda: Net(without_gradients, layer=linear(), out=linear(4, 4)),
        "gradient of 'layer.weight' is not that of autograd",
    ),
    "two tensors out": (
        lambda: Net(lambda net, x: net.layer(x.flatten(1))[0], layer=Pair()),
        "Unrecordable: layer 'layer'",
    ),
    "gradient scaled by frequency": (
        lambda: Net(
            lambda net, x: net.table((x.flatten(1) > 0).long()).sum(1),
            table=nn.Embedding(2, 4, scale_grad_by_freq=True),
        ),
        "gradient of 'table.weight' is not that of autograd",
    ),
    "hook of another's": (hooked, "gradient of '1.weight' is not that of autograd"),
    "layer within a black box and beside it": (borrowed, "gradient of 'box.inner.weight'"),
    "nothing finite": (
        lambda: Net(lambda net, x: net.layer(x.flatten(1).abs().neg().log()), layer=linear()),
        "no gradient on random inputs is finite and other than zero",
    ),
}
TRUE: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Flatten(), linear()),
    "in place on nothing recorded": lambda: nn.Sequential(
        nn.Flatten(), linear(8), nn.AvgPool1d(2), nn.ReLU(inplace=True), linear(4, 4)
    ),
    "parametrized": lambda: nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(linear())
    ),
    "instance norm": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Flatten(), linear(4, 48)
    ),
    "checkpointed in part": lambda: Net(
        lambda net, x: net.layer(checkpoint(torch.sin, x.flatten(1), use_reentrant=False)),
        layer=linear(),
    ),
    "black box": lambda: Net(lambda net, x: net.gate(x[:, 0], x[:, 1]), gate=Gate()),
    "black box that shares a weight": tied_box,
    "layer of two modules": rejoined,
    "double precision": lambda: nn.Sequential(nn.Flatten(), linear()).double(),
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make()


@pytest.mark.parametrize("kind", FALSE)
def test_model_that_would_be_recorded_wrongly_is_found(kind):
    make, reason = FALSE[kind]
    found = find_wrong_gradients(made(make), loss, SHAPE)
    assert found is not None
    assert re.search(reason, found)


@pytest.mark.parametrize("kind", TRUE)
def test_model_that_is_recorded_well_is_accepted(kind):
    assert find_wrong_gradients(made(TRUE[kind]), loss, SHAPE) is None


def test_model_that_vmap_cannot_run_either_is_an_error():
    def forward(net: Net, x: Tensor) -> Tensor:
        hidden = checkpoint(torch.sin, x.flatten(1), use_reentrant=False)
        return net.layer(input=hidden)  # which is not recorded either

    text = r"vmap cannot compute it one example at a time \(.*saved tensor hooks"
    with pytest.raises(ValueError, match=text):
        make_engine(Net(forward, layer=linear()), loss, IDENTITY, 5, SHAPE)


def test_layer_that_reuses_one_work_area_is_an_error():
    """Right at one point; at two, the first's record would hold what the second has written."""

    class Reused(nn.Module):
        area = torch.zeros(0)

        def forward(self, x: Tensor) -> Tensor:
            if self.area.shape != x.shape:
                self.area = torch.empty_like(x)
            self.area = self.area.detach()
            return self.area.copy_(x)

    net = nn.Sequential(nn.Flatten(), linear(8), nn.Tanh(), Reused(), linear(4, 8))
    with pytest.raises(ConfigError, match=r"attribute 'area' of module '3' \(Reused\) changes"):
        find_wrong_gradients(net, loss, SHAPE)


def test_model_whose_layers_depend_on_the_images_is_an_error():
    def forward(net: Net, x: Tensor) -> Tensor:
        return (net.far if (x.abs() > 1e9).any() else net.near)(x.flatten(1))

    with pytest.raises(ValueError, match=r"examples mix, as layer 'near' shows"):
        make_engine(Net(forward, near=linear(), far=linear()), loss, IDENTITY, 5, SHAPE)


def test_model_without_a_gradient_is_an_error():
    with pytest.raises(ValueError, match="modified by an inplace operation"):
        find_wrong_gradients(Net(changed_input, layer=linear()), loss, SHAPE)


def test_model_that_does_not_take_the_images_is_an_error():
    with pytest.raises(ValueError, match=r"does not take a batch of \(\d+, 2, 6, 6\)"):
        find_wrong_gradients(nn.Sequential(nn.Flatten(), linear(4, 71)), loss, SHAPE)


@pytest.mark.parametrize("kind", ["constant", "recurrent"])
def test_model_that_vmap_runs_in_its_own_precision_alone_is_no_error(kind):
    constant, recurrent = torch.eye(72), nn.LSTM(6, 4, batch_first=True)
    nets = {
        "constant": Net(lambda net, x: net.layer(x.flatten(1) @ constant), layer=linear()),
        "recurrent": Net(lambda net, x: net.layer(x.flatten(1, 2))[0][:, -1], layer=recurrent),
    }
    question = (points_of(nets[kind], 1), [1.0], draw(3, *SHAPE).float(), torch.tensor([0, 1, 2]))
    assert VmapEngine(nets[kind], loss, 3).clipped_sum(*question, Flat(1.0))
    find_wrong_gradients(nets[kind], loss, SHAPE)


def test_model_is_left_as_it_is():
    model = made(FALSE["in place, after a layer in the midst"][0])
    before = {k: p.clone() for k, p in model.state_dict().items()}
    find_wrong_gradients(model, loss, SHAPE)
    assert all(torch.equal(p, before[k]) for k, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_random_numbers_of_the_trial_are_not_used_up():
    model, before = made(TRUE["plain"]), torch.get_rng_state()
    find_wrong_gradients(model, loss, SHAPE)
    assert torch.equal(torch.get_rng_state(), before)


def begun_at_zero() -> nn.Module:
    """Wrong as "in the midst" above; the last layer lets no gradient through, for now."""
    model = made(FALSE["in place, after a layer in the midst"][0])
    nn.init.zeros_(model[-1].weight)
    return model


def disagreement(model: nn.Module, inputs: Tensor) -> float:
    """Relative distance of book-keeping from vmap, away from where the model begins."""
    targets = torch.zeros(len(inputs), dtype=torch.int64)
    question = ([points_of(model, 2)[1]], [1.0], inputs.float(), targets, Flat(1e6))
    ours, theirs = (
        flat(engine(model, loss, 3).clipped_sum(*question))
        for engine in (BookkeepingEngine, VmapEngine)
    )
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_layer_that_begins_at_zero_hides_nothing():
    assert disagreement(begun_at_zero(), draw(3, *SHAPE)) > 0.1
    assert find_wrong_gradients(begun_at_zero(), loss, SHAPE) is not None


def test_wrong_scale_is_found():
    model = nn.Sequential(nn.Flatten(), made(linear))
    model[1].register_forward_hook(lambda layer, args, output: output * 3)
    assert disagreement(model, draw(3, *SHAPE)) > 0.1
    assert find_wrong_gradients(model, loss, SHAPE) is not None


def test_models_that_print_alike_are_tried_apart():
    def within(net: Net, x: Tensor) -> Tensor:
        return net.out(net.layer(x.flatten(1)).tanh())

    def elsewhere(net: Net, x: Tensor) -> Tensor:
        return net.out(net.layer(x.flatten(1)) + x.flatten(1).sin() @ net.layer.weight.T)

    sound, unsound = (Net(f, layer=linear(), out=linear(4, 4)) for f in (within, elsewhere))
    assert repr(sound) == repr(unsound)
    assert find_wrong_gradients(sound, loss, SHAPE) is None
    assert find_wrong_gradients(unsound, loss, SHAPE) is not None


NO_FAULT_OF_THE_MODELS = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "GET was unable to find an engine to execute this computation",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
]


CALLS = {"done": 0, "fails": 0}
"""Calls so far, and the one that fails: outside the model, which must not count its own calls."""


class FailsAt(nn.Module):
    """A model that raises an error at one call of all."""

    def __init__(self, net: nn.Module, words: str) -> None:
        super().__init__()
        self.net, self.words = net, words

    def forward(self, x: Tensor) -> Tensor:
        CALLS["done"] += 1
        if CALLS["done"] == CALLS["fails"]:
            raise RuntimeError(self.words)
        return self.net(x)


@pytest.mark.parametrize(
    ("make", "engine"),
    [(TRUE["plain"], BookkeepingEngine), (FALSE["weight used elsewhere"][0], VmapEngine)],
)
def test_memory_that_runs_out_and_a_lost_gpu_say_nothing_of_the_model(make, engine):
    """At whichever call of all that an engine is tried with, and with every such message."""
    model = FailsAt(make(), "")
    CALLS.update(done=0, fails=0)
    assert type(make_engine(model, loss, IDENTITY, 24, SHAPE)) is engine
    num_calls = CALLS["done"]
    assert num_calls > 5
    # The call and the message cannot fail apart: each is met, and not each with each.
    for i in range(max(num_calls, len(NO_FAULT_OF_THE_MODELS))):
        CALLS.update(done=0, fails=1 + i % num_calls)
        model.words = NO_FAULT_OF_THE_MODELS[i % len(NO_FAULT_OF_THE_MODELS)]
        with pytest.raises(RuntimeError, match=re.escape(model.words)):
            make_engine(model, loss, IDENTITY, 24, SHAPE)
