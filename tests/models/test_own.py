"""Models of others: taken if each example answers for itself, else refused in words."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dpsweep.config.source import parse_yaml
from dpsweep.config.trial import load_trial
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.data.datasets import SPECS
from dpsweep.models import build_model
from dpsweep.models.adapt import FixedNorm, make_private
from dpsweep.models.own import Own, Timm, Torchvision
from dpsweep.privacy.engine import refuse_unsupported_layers
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients
from dpsweep.training.check import check_parts, check_trial

HERE = str(Path(__file__).parent)
TRIAL = """\
data: {name: digits}
model: {name: own, function: "own_net:make", folder: FOLDER, arguments: {width: 3}}
privacy: {epsilon: 4}
train: {batch_size: 100, epochs: 1}
optimizer: {lr: 1.0}
method: {name: dp_sgd}
"""


def own(function: str, **more: object) -> nn.Module:
    return build_model(Own(function=f"own_net:{function}", folder=HERE, **more), SPECS["digits"], 0)


def test_function_is_called_with_shape_classes_and_arguments():
    path = list(sys.path)
    model = own("make", arguments={"width": 3})
    assert model.body.weight.shape == (3, 64)
    assert model.head.weight.shape == (10, 3)
    assert sys.path == path


def test_function_s_weights_come_from_the_public_seed():
    assert torch.equal(own("make").body.weight, own("make").body.weight)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("hundred", r"^it gives 100 numbers for an example, and the data have 10 classes$"),
        ("bare", r"^it gives a number without an axis for an example, and the data have 10 cl"),
        (
            "other_size",
            r"^it does not take images of 1 x 8 x 8 \(channels, height, width\), the da",
        ),
        ("two", r"^it returns a tuple, not one tensor of logits$"),
        ("no_model", r"^own_net:no_model returned a int, not an nn\.Module$"),
        ("broken", r"^function: own_net:broken: KeyError: 'nothing here.nand much more'$"),
        ("absent", r"^function: own_net:absent: AttributeError: module 'own_net' has no attribute"),
    ],
)
def test_function_that_gives_no_fitting_model_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        own(function)


def test_file_named_as_a_module_says_what_to_write():
    with pytest.raises(InvalidKey, match=r"mynet\.py is a file\. Write mynet:FUNCTION, and folder"):
        build_model(Own(function="mynet.py:make"), SPECS["digits"], 0)


def test_missing_module_and_wrong_argument_name_the_key():
    with pytest.raises(
        InvalidKey, match=r"no module nowhere_at_all in any place .* folder: \."
    ) as caught:
        build_model(Own(function="nowhere_at_all:f"), SPECS["digits"], 0)
    assert caught.value.key == "function"
    with pytest.raises(InvalidKey, match=r"called as make\(shape=.*, depth=3\), and make does not"):
        own("make", arguments={"depth": 3})


@pytest.mark.parametrize("text", ["make", "own_net.make", "a:b:c", ":make", "os;x:y"])
def test_name_that_is_no_module_and_function_is_refused(text):
    with pytest.raises(ValueError, match="function"):
        Own(function=text)


def test_batch_norm_of_ones_own_is_told_by_its_layer():
    text = TRIAL.replace("FOLDER", HERE).replace(", arguments: {width: 3}", "")
    source = parse_yaml(text.replace(":make", ":noisy"), "x.yaml")
    with pytest.raises(ConfigError, match=r"x\.yaml:2: model: .*'1' is a BatchNorm1d, which"):
        check_parts(load_trial(source), source)


def test_that_it_runs_the_user_s_code_is_said_aloud():
    source = parse_yaml(TRIAL.replace("FOLDER", HERE), "x.yaml")
    (warning,) = check_trial(load_trial(source), source)
    assert warning.startswith(f"model.function: own_net:make (from {HERE}) is your code. It runs")


@pytest.fixture(scope="module")
def resnet():
    return build_model(Torchvision(model="resnet18"), SPECS["cifar10"], 0)


def test_torchvision_model_has_group_norm_and_is_right_for_book_keeping(resnet):
    assert not list(resnet.buffers())
    assert isinstance(resnet.bn1, nn.GroupNorm)
    assert (resnet.bn1.num_groups, resnet.layer4[0].bn1.num_groups) == (16, 32)
    assert not any(getattr(m, "inplace", False) for m in resnet.modules())
    refuse_unsupported_layers(resnet)
    assert find_wrong_gradients(resnet, nn.functional.cross_entropy, (3, 32, 32)) is None


def test_torchvision_model_of_other_channels_says_both():
    with pytest.raises(ValueError, match=r"takes 3 channels, and the data have images of 1 x 28"):
        build_model(Torchvision(model="resnet18"), SPECS["mnist"], 0)


def test_unknown_torchvision_model_names_the_key():
    with pytest.raises(
        InvalidKey, match=r"model: resnet19: ValueError: Unknown model resnet19"
    ) as e:
        build_model(Torchvision(model="resnet19"), SPECS["cifar10"], 0)
    assert e.value.key == "model"


def test_timm_that_is_not_installed_is_told_with_the_command(monkeypatch):
    monkeypatch.setattr("dpsweep.models.own.find_spec", lambda _: None)
    with pytest.raises(
        InvalidKey, match=r"timm is not installed here\. Add it with: pip install timm"
    ):
        build_model(Timm(model="vit"), SPECS["cifar10"], 0)


def test_dropout_and_layers_left_out_at_random_are_switched_off():
    class DropPath(nn.Module):
        drop_prob = 0.3

    model = nn.Sequential(nn.Dropout(0.5), DropPath(), nn.MultiheadAttention(4, 2, dropout=0.1))
    make_private(model)
    assert (model[0].p, model[1].drop_prob, model[2].dropout) == (0.0, 0.0, 0.0)


def test_batch_norm_becomes_a_group_norm_of_at_least_four_channels_a_group():
    sizes = {4: 1, 16: 4, 48: 12, 64: 16, 512: 32, 7: 1, 100: 25}
    model = nn.Sequential(*(nn.BatchNorm2d(size, eps=0.1) for size in sizes))
    make_private(model)
    assert [m.num_groups for m in model] == list(sizes.values())
    assert [(m.num_channels, m.eps) for m in model] == [(size, 0.1) for size in sizes]


def test_batch_norm_whose_size_is_not_known_cannot_be_replaced():
    with pytest.raises(InvalidKey, match=r"'1' is a LazyBatchNorm2d whose size is not known yet"):
        make_private(nn.Sequential(nn.ReLU(), nn.LazyBatchNorm2d()))


def test_batch_norm_with_statistics_to_keep_computes_what_it_did_in_evaluation():
    norm = nn.BatchNorm2d(3).double()
    rng = torch.Generator().manual_seed(0)
    for x in (norm.running_mean, norm.weight.data, norm.bias.data):
        x.copy_(torch.randn(3, generator=rng))
    norm.running_var.copy_(torch.rand(3, generator=rng) + 0.5)
    images = torch.randn(4, 3, 2, 2, generator=rng, dtype=torch.float64)
    expected = norm.eval()(images)
    kept = make_private(nn.Sequential(norm), keep_statistics=True)
    assert isinstance(kept[0], FixedNorm)
    assert torch.equal(kept.train()(images), expected)
    assert kept[0].running_mean is norm.running_mean
    with pytest.raises(InvalidKey, match="keeps no statistics"):
        make_private(
            nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)), keep_statistics=True
        )
