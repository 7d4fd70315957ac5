"""Weights from a file fit or are refused by name; what is frozen neither moves nor is asked."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dpsweep.core.errors import InvalidKey
from dpsweep.data.datasets import SPECS
from dpsweep.models import build_model
from dpsweep.models.adapt import FixedNorm
from dpsweep.models.cnn import CnnSmall
from dpsweep.models.own import Own, Torchvision
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import VmapEngine, make_engine
from dpsweep.privacy.geometry import IDENTITY

DIGITS = SPECS["digits"]
HERE = str(Path(__file__).parent)


@pytest.fixture
def weights(tmp_path):
    """A file of cnn_small's weights at another seed."""
    place = tmp_path / "weights.pt"
    torch.save(build_model(CnnSmall(), DIGITS, 5).state_dict(), place)
    return place


def test_model_starts_from_its_file_and_not_from_the_seed(weights):
    loaded, other = (
        build_model(CnnSmall(weights=str(weights)), DIGITS, 0),
        build_model(CnnSmall(), DIGITS, 5),
    )
    for (name, a), (_, b) in zip(loaded.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("wrap", [lambda x: {"state_dict": x, "epoch": 3}, lambda x: {"model": x}])
def test_wrapped_weights_of_a_parallel_model_are_found(weights, wrap):
    plain = {f"module.{k}": x for k, x in torch.load(weights).items()}
    torch.save(wrap(plain), weights)
    loaded, other = (
        build_model(CnnSmall(weights=str(weights)), DIGITS, 0),
        build_model(CnnSmall(), DIGITS, 5),
    )
    assert torch.equal(loaded[0].weight, other[0].weight)


def test_weights_that_do_not_fit_are_told_by_three_keys_of_each_kind(weights):
    found = torch.load(weights)
    for key in ("0.weight", "0.bias", "3.weight", "3.bias"):
        found[f"other.{key}"] = found.pop(key)
    found["7.weight"] = found["7.weight"][:3]
    torch.save(found, weights)
    message = (
        r"4 missing: 0\.bias, 0\.weight, 3\.bias, \.\.\.; 4 unexpected: other\.0\.bias, "
        r"other\.0\.weight, other\.3\.bias, \.\.\.; 1 of another shape: 7\.weight "
        r"\(\(3, 128\), and the model has \(10, 128\)\)\. Name layers .* model\.fresh$"
    )
    with pytest.raises(InvalidKey, match=message) as caught:
        build_model(CnnSmall(weights=str(weights)), DIGITS, 0)
    assert caught.value.key == "weights"


def test_fresh_layers_start_from_the_seed_and_are_not_looked_up(weights):
    found = torch.load(weights)
    found["7.weight"] = found["7.weight"][:3]
    torch.save(found, weights)
    loaded = build_model(CnnSmall(weights=str(weights), fresh=("7",)), DIGITS, 0)
    assert torch.equal(loaded[7].weight, build_model(CnnSmall(), DIGITS, 0)[7].weight)
    assert torch.equal(loaded[3].weight, found["3.weight"])


def test_file_that_would_run_code_is_refused(tmp_path):
    place = tmp_path / "model.pt"
    torch.save(nn.Linear(2, 2), place)
    with pytest.raises(
        InvalidKey, match=r"model\.pt: holds more than plain tensors, or is no file"
    ):
        build_model(CnnSmall(weights=str(place)), DIGITS, 0)
    place.write_text("hello")
    with pytest.raises(
        InvalidKey, match=r"model\.pt: holds more than plain tensors, or is no file"
    ):
        build_model(CnnSmall(weights=str(place)), DIGITS, 0)
    torch.save([torch.zeros(1)], place)
    with pytest.raises(InvalidKey, match=r"holds no mapping of names to tensors"):
        build_model(CnnSmall(weights=str(place)), DIGITS, 0)


@pytest.mark.parametrize(
    ("config", "key", "message"),
    [
        (CnnSmall(weights="nowhere.pt"), "weights", r"nowhere\.pt: no such file"),
        (CnnSmall(fresh=("7",)), "fresh", r"model\.weights, and that is missing"),
        (CnnSmall(train=("head",)), "train", r"'head' names no parameters .* Known: 0, 3, 7\.$"),
        (CnnSmall(train=("7", "1")), "train", r"'1' names no parameters"),
    ],
)
def test_keys_that_say_nothing_are_refused(config, key, message):
    with pytest.raises(InvalidKey, match=message) as caught:
        build_model(config, DIGITS, 0)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("train", "names"),
    [
        (("7",), ["7.weight", "7.bias"]),
        (("3.bias", "7"), ["3.bias", "7.weight", "7.bias"]),
    ],
)
def test_frozen_parameters_are_no_parameters_and_the_others_answer_as_before(train, names):
    model, whole = build_model(CnnSmall(train=train), DIGITS, 0), build_model(CnnSmall(), DIGITS, 0)
    assert [k for k, _ in model.named_parameters()] == names
    rng = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(6, 1, 8, 8, generator=rng), torch.arange(6)
    loss, params = nn.functional.cross_entropy, dict(whole.named_parameters())
    every = VmapEngine(whole, loss, 6).clipped_sum([params], [1.0], inputs, targets, Flat(1e6))
    for choice in ("bookkeeping", "vmap"):
        engine = make_engine(model, loss, IDENTITY, 6, (1, 8, 8), choice)
        mine = dict(model.named_parameters())
        total = engine.clipped_sum([mine], [1.0], inputs, targets, Flat(1e6))
        assert list(total) == names
        for k, x in total.items():
            torch.testing.assert_close(x, every[k], rtol=1e-4, atol=1e-6)


def test_clip_norm_is_spent_on_what_is_trained_alone():
    model = build_model(CnnSmall(train=("7",)), DIGITS, 0)
    engine = make_engine(model, nn.functional.cross_entropy, IDENTITY, 1, (1, 8, 8))
    total = engine.clipped_sum(
        [dict(model.named_parameters())],
        [1.0],
        torch.ones(1, 1, 8, 8),
        torch.zeros(1).long(),
        Flat(0.1),
    )
    norm = torch.stack([x.norm() for x in total.values()]).norm()
    assert norm.item() == pytest.approx(0.1, rel=1e-5)


def test_backbone_of_torchvision_keeps_the_statistics_of_its_weights(tmp_path):
    from torchvision.models import resnet18

    theirs = resnet18(weights=None)
    for m in theirs.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.fill_(0.1)
            m.running_var.fill_(2.0)
    place = tmp_path / "resnet18.pth"
    torch.save(theirs.state_dict(), place)
    config = Torchvision(model="resnet18", weights=str(place), fresh=("fc",), train=("fc",))
    model = build_model(config, SPECS["cifar10"], 0)
    assert [k for k, _ in model.named_parameters()] == ["fc.weight", "fc.bias"]
    assert isinstance(model.bn1, FixedNorm)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    theirs.fc = model.fc
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs.eval()(images))


def test_head_of_a_model_of_one_s_own_is_trained_by_its_name():
    config = Own(function="own_net:make", folder=HERE, train=("head",))
    model = build_model(config, DIGITS, 0)
    assert [k for k, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    assert "body.weight" in dict(model.named_buffers())
