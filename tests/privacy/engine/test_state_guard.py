"""What a model keeps of examples stops the trial; what it keeps of their shape alone does not."""

import copy
import itertools
import logging
import math
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import remembering
import torch
from remembering import WAYS_TO_TRACK, Tracking
from torch import Tensor, nn
from zoo import CLASSES, SHAPE, ZOO, Net, loss, network

from dpsweep.core.errors import ConfigError
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import make_engine, state_guard
from dpsweep.privacy.engine.state_guard import StateGuard, check_stateless, warm_up
from dpsweep.privacy.geometry import IDENTITY

pytestmark = [
    pytest.mark.usefixtures("forgotten"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule"),
]
LIMIT = 50.0
recording_engines = pytest.mark.parametrize("choice", ["bookkeeping", "opacus"])
every_engine = pytest.mark.parametrize("choice", ["auto", "bookkeeping", "vmap", "opacus"])


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def asked(model: nn.Module, choice: str, params, images: Tensor) -> None:
    engine = make_engine(model, loss, IDENTITY, 2, SHAPE, choice)
    engine.clipped_sum([params], [1.0], images, torch.zeros(len(images), dtype=int), Flat(1.0))


# What examples may not change, by the engines.


class Linear(nn.Linear):
    """Halves its weights in place once they have grown."""

    def __init__(self, *, openly: bool) -> None:
        super().__init__(72, 4)
        self.openly = openly

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.weight.norm() > LIMIT:
                (self.weight if self.openly else self.weight.data).div_(2)
        return super().forward(x)


class Peak(nn.Module):
    """Remembers the brightest pixel, but of unusual images alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.register_buffer("peak", torch.zeros(()))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        brightest = x.detach().amax()
        if LIMIT < brightest < 2 * LIMIT:
            if self.way == "another tensor":
                self.peak = brightest
            elif self.way == "in place":
                self.peak.copy_(brightest)
            else:
                self.peak.data.copy_(brightest)
        return x


@pytest.mark.parametrize("openly", [True, False])
def test_weights_that_are_rescaled_once_they_have_grown(openly):
    model = nn.Sequential(nn.Flatten(), Linear(openly=openly))
    point, images = weights(model), torch.randn(5, *SHAPE)
    asked(model, "auto", point, images)
    grown = {k: 1e3 * p for k, p in point.items()}
    with pytest.raises(ConfigError, match=r"model: parameter '1.weight' changes when"):
        asked(model, "auto", grown, images)


@recording_engines
@pytest.mark.parametrize("way", ["another tensor", "in place", "through data"])
def test_buffer_that_remembers_unusual_images(choice, way):
    model = nn.Sequential(Peak(way), nn.Flatten(), nn.Linear(72, 4))
    point, images = weights(model), torch.randn(5, *SHAPE)
    asked(model, choice, point, images)
    images[4, 0, 0, 0] = 1.5 * LIMIT
    with pytest.raises(ConfigError, match=r"model: buffer 'peak' of module '0' \(Peak\) changes"):
        asked(model, choice, point, images)


def test_weights_that_are_no_numbers_are_no_change():
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4))
    point = {k: torch.full_like(p, torch.nan) for k, p in weights(model).items()}
    asked(model, "auto", point, torch.randn(5, *SHAPE))


@recording_engines
def test_models_with_buffers_that_stay_are_asked(choice):
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4))
    model.register_buffer("mean", torch.ones(3))
    asked(model, choice, weights(model), torch.randn(5, *SHAPE))


def ready(way: str, choice: str, flag: list[bool]):
    """An engine that has summed a batch without harm, of a model that tracks once `flag` is set."""
    model = remembering.tracking(SHAPE, CLASSES, way=way)
    model[0].due = lambda: flag[0]
    engine = make_engine(model, loss, IDENTITY, 2, SHAPE, choice)
    images, targets = torch.randn(5, *SHAPE), torch.zeros(5, dtype=int)

    def batch() -> None:
        engine.clipped_sum([weights(model)], [1.0], images, targets, Flat(1.0))

    batch()
    batch()
    return batch


@recording_engines
@pytest.mark.parametrize("way", WAYS_TO_TRACK)
def test_memory_is_found_in_the_batch_in_which_it_begins(choice, way):
    flag = [False]
    batch = ready(way, choice, flag)
    flag[0] = True
    what = r"attribute 'mean(\.mean)?' of module '0' \(Tracking\)"
    if way == "class":
        what = "attribute 'shared' of class remembering.Tracking"
    with pytest.raises(ConfigError, match=f"^model: {what} changes when the model is called. What"):
        batch()


@recording_engines
def test_what_is_as_before_at_the_end_of_a_batch_is_found_within_it(choice):
    """Each microbatch heard of the one before, though nothing is left of it."""
    due = [False]

    def forward(net: Net, x: Tensor) -> Tensor:
        if due[0]:
            net.kept = (net.kept + 1) % 3  # three microbatches a batch
        return net.layer(x.flatten(1)) * (1 + net.kept)

    model = Net(forward, layer=nn.Linear(72, 4))
    model.kept = 0
    engine = make_engine(model, loss, IDENTITY, 2, SHAPE, choice)
    batch = ([weights(model)], [1.0], torch.randn(5, *SHAPE), torch.zeros(5, dtype=int), Flat(1.0))
    engine.clipped_sum(*batch)
    due[0] = True
    with pytest.raises(ConfigError, match=r"attribute 'kept' of the model \(Net\) changes when"):
        engine.clipped_sum(*batch)


def test_tensor_that_is_kept_from_within_vmap_is_found():
    flag = [False]
    batch = ready("tensor", "vmap", flag)
    flag[0] = True
    with pytest.raises(ConfigError, match=r"attribute 'mean' of module '0' \(Tracking\) changes"):
        batch()


@recording_engines
def test_memory_that_ends_with_the_batch_is_found_before(choice):
    """Call by call: a counter that is back where it was at the end of each batch."""

    class Turning(nn.Module):
        turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn = (self.turn + 1) % 3
            return x * (1 + self.turn)

    model = nn.Sequential(Turning(), nn.Flatten(), nn.Linear(72, 4))
    with pytest.raises(ConfigError, match=r"attribute 'turn' of module '0' \(Turning\) changes"):
        make_engine(model, loss, IDENTITY, 2, SHAPE, choice)


@pytest.mark.parametrize("what", ["attribute", "grad"])
def test_what_is_attached_to_a_weight_is_found(what):
    flag = [False]

    def forward(net: Net, x: Tensor) -> Tensor:
        if flag[0] and what == "attribute":
            net.layer.weight.mean = x.mean().detach()
        elif flag[0]:
            net.layer.weight.grad = torch.full_like(net.layer.weight, x.detach().mean())
        return net.layer(x.flatten(1))

    model = Net(forward, layer=nn.Linear(72, 4))
    params, images = weights(model), torch.randn(5, *SHAPE)
    engine = make_engine(model, loss, IDENTITY, 2, SHAPE)
    batch = ([params], [1.0], images, torch.zeros(5, dtype=int), Flat(1.0))
    engine.clipped_sum(*batch)
    flag[0] = True
    with pytest.raises(ConfigError, match=r"an attribute of parameter 'layer\.weight' changes"):
        engine.clipped_sum(*batch)
    assert not any(vars(p) for p in params.values()), "nor does it outlive the batch"
    assert all(p.grad is None for p in params.values())


@every_engine
@pytest.mark.parametrize("make", ["act_norm", "cooling", "by_rows"])
def test_memory_that_shows_at_once_is_refused_by_every_engine(choice, make):
    model = getattr(remembering, make)(SHAPE, CLASSES)
    with pytest.raises(ConfigError, match=r"of module '0' \(.*\) (changes when|depends on the im)"):
        make_engine(model, loss, IDENTITY, 2, SHAPE, choice)


def test_what_cannot_be_recorded_and_remembers_is_not_left_to_vmap():
    model = remembering.cooling(SHAPE, CLASSES, recorded=False)
    with pytest.raises(ConfigError, match="attribute 'calls' of module 'cooling'"):
        make_engine(model, loss, IDENTITY, 2, SHAPE)


@every_engine
def test_a_layer_with_an_extra_state_is_refused_by_every_engine(choice):
    with pytest.raises(ValueError, match=r"layer '0' \(Maxima\) has get_extra_state"):
        make_engine(remembering.extra_state(SHAPE, CLASSES), loss, IDENTITY, 2, SHAPE, choice)


# What may stay.


@every_engine
def test_cache_that_depends_on_the_shape_alone_stays(choice):
    model = remembering.cached(SHAPE, CLASSES)
    engine = make_engine(model, loss, IDENTITY, 2, SHAPE, choice)
    assert model[0].waves, "it was filled on black images"
    for num in (5, 0, 3):
        images, targets = torch.randn(num, *SHAPE), torch.zeros(num, dtype=int)
        engine.clipped_sum([weights(model)], [1.0], images, targets, Flat(1.0))


def test_recurrent_layers_list_the_weights_of_each_point_anew():
    recurrent = nn.LSTM(6, 4, batch_first=True)
    model = Net(lambda net, x: net.layer(x.flatten(1, 2))[0][:, -1], layer=recurrent)
    engine = make_engine(model, loss, IDENTITY, 2, SHAPE)
    for scale in (1.0, 1.1):
        point = {k: scale * p for k, p in weights(model).items()}
        images, targets = torch.randn(5, *SHAPE), torch.zeros(5, dtype=int)
        total = engine.clipped_sum([point], [1.0], images, targets, Flat(1.0))
        assert total["layer.weight_ih_l0"].norm() > 0


@pytest.mark.parametrize("net", ZOO)
def test_no_sound_net_is_refused(net):
    model = network(net)
    check_stateless(model, SHAPE)
    guard = StateGuard(model)
    warm_up(model, SHAPE)
    guard.check()


@pytest.mark.parametrize("net", ZOO)
def test_a_model_is_left_as_it_is(net):
    model = network(net)
    before, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    own = {k: id(p) for k, p in model.named_parameters()}
    check_stateless(model, SHAPE)
    warm_up(model, SHAPE)
    assert all(torch.equal(x, before[k]) for k, x in model.state_dict().items())
    assert {k: id(p) for k, p in model.named_parameters()} == own
    assert torch.equal(torch.get_rng_state(), draws)


def test_layers_made_at_the_first_call_are_no_memory():
    class Lazy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "made"):
                self.made = nn.Linear(x[0].numel(), 3)
            return self.made(x.flatten(1))

    check_stateless(nn.Sequential(Lazy(), nn.Linear(3, 4)), SHAPE)


def test_model_that_cannot_be_copied_says_why():
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4))
    model.kept = 2 * model[1].weight  # as the old weight_norm keeps one
    with pytest.raises(ConfigError, match=r"^model: it cannot be copied \(Only Tensors created"):
        check_stateless(model, SHAPE)


# The guard alone.


def holding(**attributes: object) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    vars(model[1]).update(attributes)
    return model


EQUAL = {
    "string": lambda: "".join(["a", "b"]),
    "large number": lambda: int("12345678901234567890"),
    "float": lambda: float("0.3"),
    "not a number": lambda: float("nan"),
    "tuple": lambda: tuple([1, 2.5, "a"]),
    "tuple of what changes": lambda: ([1], {"a": 2}),
    "list": lambda: [1, [2], {"a": {"b"}}],
    "tensor": lambda: torch.tensor([0.0, math.nan]),
    "whole numbers": lambda: torch.tensor([1, 2]),
    "truths": lambda: torch.tensor([True]),
    "complex": lambda: torch.tensor([1j]).conj(),
    "half": lambda: torch.ones(3, dtype=torch.bfloat16),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "channels last": lambda: torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "array": lambda: np.array([1.0, math.nan]),
    "array of objects": lambda: np.array(["a", None], dtype=object),
    "object": lambda: SimpleNamespace(a=[1]),
    "generator": lambda: torch.Generator().manual_seed(3),
    "python's generator": lambda: random.Random(3),
    "numpy's generator": lambda: np.random.default_rng(3),
    "bytes": lambda: bytearray(b"ab"),
    "layer": lambda: nn.Identity(),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_an_equal_object_in_its_place_is_no_change(kind):
    model = holding(kept=EQUAL[kind]())
    guard = StateGuard(model)
    for _ in range(2):
        vars(model[1])["kept"] = EQUAL[kind]()
        assert guard.find_change() is None


def test_what_is_the_same_object_is_not_walked_again(monkeypatch):
    guard = StateGuard(holding(kept=[1, {"a": torch.ones(2)}]))
    monkeypatch.setattr(StateGuard, "_walk_state", None)
    assert guard.find_change() is None


def _next(x: np.random.Generator) -> object:
    return x.random()


CHANGES = {
    "added to an object": (lambda: SimpleNamespace(), lambda x: setattr(x, "more", 1)),
    "minus zero": (lambda: torch.zeros(2), lambda x: x.neg_()),
    "another nan": (lambda: torch.tensor(math.nan), lambda x: x.view(torch.int32).add_(1)),
    "deep": (lambda: {"a": [([{"b": [1]}],)]}, lambda x: x["a"][0][0][0]["b"].append(2)),
    "key": (lambda: {1: True}, lambda x: (x.clear(), x.update({2: True}))),
    "order": (lambda: [1, 2], lambda x: x.reverse()),
    "attribute of a tensor": (lambda: torch.zeros(1), lambda x: setattr(x, "more", 1)),
    "draw of torch": (lambda: torch.Generator(), lambda x: torch.rand(1, generator=x)),
    "draw of python": (lambda: random.Random(0), lambda x: x.random()),
    "draw of numpy": (lambda: np.random.default_rng(0), _next),
    "bytes": (lambda: bytearray(2), lambda x: x.append(1)),
    "buffer of a hidden layer": (
        lambda: (nn.BatchNorm1d(2),),
        lambda x: x[0].running_mean.data.add_(1),
    ),
    "sparse": (lambda: torch.eye(2).to_sparse(), lambda x: x.mul_(2)),
    "distribution": (
        lambda: torch.distributions.Normal(torch.zeros(()), torch.ones(())),
        lambda x: x.loc.add_(1),
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_within_the_same_object_is_found(kind):
    make, change = CHANGES[kind]
    model = holding(kept=make())
    guard = StateGuard(model)
    assert guard.find_change() is None
    change(model[1].kept)
    assert guard.find_change().startswith("attribute 'kept")
    assert guard.find_change().endswith("of module '1' (Linear)")


MODULES = {
    "layer": (lambda m: m.append(nn.Identity()), "module '2' (Identity)"),
    "layer less": (lambda m: m.pop(1), "module '1' (Linear)"),
    "buffer": (lambda m: m.register_buffer("b", torch.ones(1)), "buffer 'b' of the model (Seq"),
    "parameter": (lambda m: m.register_parameter("p", None), "attribute '_parameters' of the mod"),
    "mode": (lambda m: m[1].eval(), "attribute 'training' of module '1' (Linear)"),
    "hook": (lambda m: m[1].register_forward_hook(print), "attribute '_forward_hooks' of module"),
}


@pytest.mark.parametrize("kind", MODULES)
def test_what_is_added_to_a_module_is_found(kind):
    change, what = MODULES[kind]
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    guard = StateGuard(model)
    change(model)
    assert guard.find_change().startswith(what)


def test_zero_that_turns_into_minus_zero_is_a_change_of_a_number_too():
    model = holding(kept=0.0)
    guard = StateGuard(model)
    model[1].kept = -0.0
    assert guard.find_change() is not None
    model[1].kept = 0
    assert guard.find_change() is not None


def test_objects_that_change_whenever_they_are_used_are_not_opened():
    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = logging.getLogger("dpsweep.test")
            self.lock = threading.Lock()
            self.count = itertools.count  # the function, and no counter

    model = Watch()
    guard = StateGuard(model)
    model.log.debug("filling its cache")
    with model.lock:
        assert guard.find_change() is None


def test_keys_which_may_be_private_are_not_told():
    model = holding(kept={"of": {0.1234: 1}})
    guard = StateGuard(model)
    model[1].kept["of"][0.4321] = 2
    assert guard.find_change() == "attribute 'kept' of module '1' (Linear)"


def test_two_classes_of_one_name_are_two():
    def made() -> nn.Module:
        class Layer(nn.Module):
            shared = 0

        return Layer()

    model = nn.Sequential(made(), made())
    type(model[0]).__module__ = "first"
    guard = StateGuard(model)
    type(model[0]).shared = 1
    assert guard.find_change().startswith("attribute 'shared' of class first.")


def test_the_model_s_own_weights_are_watched_where_they_are_asked():
    model = nn.Sequential(nn.Linear(2, 2))
    elsewhere, here = StateGuard(model), StateGuard(model, with_parameters=True)
    model[0].weight.data.add_(1)
    assert elsewhere.find_change() is None
    assert here.find_change() == "parameter 'weight' of module '0' (Linear)"


def test_weights_that_another_attribute_holds_are_watched():
    model = holding()
    model[1].held = [model[1].weight]
    guard = StateGuard(model)
    model[1].weight.data.add_(1)
    assert guard.find_change() == "attribute 'held' of module '1' (Linear)"


def test_more_than_can_be_compared_is_refused(monkeypatch):
    monkeypatch.setattr(state_guard, "_MOST", 1000)
    with pytest.raises(ConfigError, match=r"holds more than 1,000 entries in attributes and cont"):
        StateGuard(holding(kept=list(range(1000))))


def test_tensors_of_a_gpu_are_waited_for_once(monkeypatch):
    """No GPU here: the same comparison as there, on the CPU; `item` is where it would wait."""
    real, waits = Tensor.item, []
    monkeypatch.setattr(state_guard, "_differs", lambda now, was: None)
    monkeypatch.setattr(Tensor, "item", lambda x: waits.append(1) or real(x))
    model = holding(a=torch.ones(3), b=[torch.zeros(2), torch.full((2,), math.nan)])
    model.register_buffer("c", torch.ones(2))
    guard = StateGuard(model)
    point = torch.ones(4)
    assert guard.find_change([("point", point)], [point.clone()]) is None
    assert waits == [1]
    model[1].b[1][0] = 0
    assert guard.find_change([("point", point)], [point.clone()]).startswith("attribute 'b'")
    assert waits == [1, 1]


def test_mean_that_a_layer_tracks_would_be_seen_by_no_check_before(monkeypatch):
    """The counter-check: what these tests plant is harmless to all other checks."""
    flag = [False]
    model = remembering.tracking(SHAPE, CLASSES, way="float")
    assert isinstance(model[0], Tracking)
    model[0].due = lambda: flag[0]
    monkeypatch.setattr(StateGuard, "check", lambda *_: None)
    engine = make_engine(model, loss, IDENTITY, 2, SHAPE)
    flag[0] = True
    images, targets = torch.randn(5, *SHAPE), torch.zeros(5, dtype=int)
    engine.clipped_sum([weights(model)], [1.0], images, targets, Flat(1.0))
    assert model[0].mean != 0.0
