"""Forward and backward in bf16: records are rounded, and what is made of them is not."""

import copy

import pytest
import torch
from oracle import CLIPS, QUERIES, draw, flat, points_of
from pairs import pairs
from torch import nn

from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine, make_engine
from dpsweep.privacy.engine.base import Microbatch, draw_classes
from dpsweep.privacy.engine.mixing_check import find_place_dependence
from dpsweep.privacy.engine.parallel import DataParallelEngine
from dpsweep.privacy.engine.precision import refuse_precision
from dpsweep.privacy.geometry import IDENTITY

loss = nn.functional.cross_entropy
SPEC = (1, 8, 8)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.Flatten(),
        nn.Linear(54, 4),
    )


def attention() -> nn.Module:
    return nn.Sequential(
        Tokens(),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


class Tokens(nn.Module):
    """Rows of an image as tokens."""

    def forward(self, x):
        return x.reshape(len(x), 8, 8)


MODELS = {"convolutions": convolutions, "attention": attention}


def built(make) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make()


def batch(num):
    return draw(num, *SPEC, seed=4).float(), torch.arange(num) % 4


@pairs(make=MODELS, clip=CLIPS, query=QUERIES)
def test_the_sum_is_that_of_float32_but_for_the_rounding_of_records(make, clip, query):
    model = built(make)
    asked = points_of(model, len(query)), query, *batch(9), clip
    exact = BookkeepingEngine(model, loss, 4).clipped_sum(*asked)
    found = BookkeepingEngine(model, loss, 4, precision="bf16").clipped_sum(*asked)
    apart = float((flat(found) - flat(exact)).norm() / flat(exact).norm())
    assert 1e-5 < apart < 0.05  # bf16 has 8 bits


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_records_hold_no_more_than_eight_bits_and_are_float32(make):
    model = built(make)
    engine = BookkeepingEngine(model, loss, 4, precision="bf16")
    inputs, targets = batch(4)
    params = points_of(model, 1)[0]
    seen = engine.collect_contributions(
        params, Microbatch(inputs, targets, torch.ones(4, dtype=torch.bool))
    )
    tensors = [x for some in seen.values() for x in some]
    assert {x.dtype for x in tensors} == {torch.float32}
    rounded = [torch.equal(x, x.bfloat16().float()) for x in tensors]
    assert sum(rounded) >= len(rounded) / 2  # group norm computes in float32, and its input is not


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_an_example_adds_the_clip_norm_at_most(make, clip):
    """Its norm is that of the rounded records, not of what they were before."""
    model = built(make)
    engine = BookkeepingEngine(model, loss, 4, precision="bf16")
    points = points_of(model, 1)
    inputs, targets = batch(12)
    for i in range(12):
        inputs[i] *= 10.0 ** (i % 4)
        own = engine.clipped_sum(points, [1.0], inputs[i : i + 1], targets[i : i + 1], clip)
        length = float(flat(own).norm())
        assert length <= clip.clip_norm * (1 + 1e-6)


def test_portions_have_one_size():
    model, sizes = built(convolutions), set()

    class Noting(BookkeepingEngine):
        """Notes the rows of its portions."""

        def _portion(self, points, weights, portion, clip):
            sizes.add(len(portion.present_B))
            return super()._portion(points, weights, portion, clip)

    for num in (1, 5, 9):
        engine = Noting(model, loss, 8, precision="bf16")
        engine.clipped_sum(points_of(model, 1), [1.0], *batch(num), Flat(1.0))
        other = Noting(copy.deepcopy(model), loss, 8, precision="bf16")  # a thread each
        shared = DataParallelEngine((engine, other))
        shared.clipped_sum(points_of(model, 1), [1.0], *batch(num), Flat(1.0))
    assert sizes == {8}


class ByPlace(nn.Module):
    """Rounds the first example of a batch otherwise, as a kernel of another tile may."""

    def __init__(self, of_gradients: bool) -> None:
        super().__init__()
        self.of_gradients, self.out = of_gradients, nn.Linear(64, 4)

    def forward(self, x):
        x = x.flatten(1)
        places = torch.arange(len(x))[:, None] == 0
        if not self.of_gradients:
            return self.out(x * torch.where(places, 1 + 2.0**-8, 1.0))
        y = self.out(x)
        return torch.where(places, y * (1 + 2.0**-8), y) if y.requires_grad else y


class Averaging(nn.Module):
    """Takes the mean over the batch off."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 4)

    def forward(self, x):
        x = x.flatten(1)
        return self.out(x - x.mean(0))


@pytest.mark.parametrize(
    "make",
    [lambda: ByPlace(False), lambda: ByPlace(True), Averaging],
    ids=["forward", "backward", "others"],
)
def test_records_that_change_with_the_place_in_a_batch_are_found(make):
    engine = BookkeepingEngine(built(make), loss, 8, precision="bf16")
    assert find_place_dependence(engine, SPEC, 8, draw_classes) == "out"


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_here_no_record_does(make):
    engine = BookkeepingEngine(built(make), loss, 8, precision="bf16")
    assert find_place_dependence(engine, SPEC, 8, draw_classes) is None


def test_a_trial_with_such_a_kernel_is_refused(forgotten, monkeypatch):
    def make(precision):
        how = {"precision": precision}
        return make_engine(built(convolutions), loss, IDENTITY, 8, SPEC, **how)

    make("bf16")
    monkeypatch.setattr("dpsweep.privacy.engine.find_place_dependence", lambda *_: "3")
    with pytest.raises(ValueError, match=r"bf16 rounds what layer '3' computes for an example"):
        make("bf16")
    make(None)


@pytest.mark.parametrize("choice", ["vmap", "opacus"])
def test_engines_without_records_are_refused(choice, forgotten):
    with pytest.raises(ValueError, match=f"engine {choice} keeps no records to sum in float32"):
        make_engine(built(convolutions), loss, IDENTITY, 8, SPEC, choice, precision="bf16")


class Unrecorded(nn.Module):
    """Uses a layer's weights elsewhere: vmap alone can compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 4)

    def forward(self, x):
        x = x.flatten(1)
        return self.out(x) + x @ self.out.weight.T


def test_a_model_that_vmap_alone_computes_is_refused(forgotten):
    with pytest.raises(ValueError, match=r"train\.precision needs the book-keeping engine"):
        make_engine(built(Unrecorded), loss, IDENTITY, 8, SPEC, precision="bf16")


def test_tf32_is_refused_where_it_is_not_or_would_reach_other_threads():
    cuda = torch.device("cuda", 0)
    with pytest.raises(ValueError, match="tf32 is a format of NVIDIA's GPUs"):
        refuse_precision("tf32", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"threads for 2 GPUs .* Use bf16, or resources\.gpu: 1"):
        refuse_precision("tf32", cuda, 2)
    refuse_precision("tf32", cuda)
    refuse_precision("bf16", torch.device("cpu"), 2)


class Casting(nn.Module):
    """Multiplies in bf16 by itself."""

    def __init__(self, by_autocast: bool) -> None:
        super().__init__()
        self.by_autocast, self.out = by_autocast, nn.Linear(64, 4)

    def forward(self, x):
        x = x.flatten(1)
        if not self.by_autocast:
            return nn.functional.linear(x.bfloat16(), self.out.weight.bfloat16()).float()
        with torch.autocast("cpu", torch.bfloat16):
            return self.out(x).float()


@pytest.mark.parametrize("by_autocast", [True, False])
@pytest.mark.parametrize("choice", ["auto", "vmap"])
def test_a_model_that_multiplies_in_bf16_by_itself_is_refused(by_autocast, choice, forgotten):
    with pytest.raises(
        ValueError, match=r"multiplies in torch.bfloat16 \(linear\).*train.precision"
    ):
        make_engine(built(lambda: Casting(by_autocast)), loss, IDENTITY, 8, SPEC, choice)
