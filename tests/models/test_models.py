"""Models start from the public seed alone, and each example answers for itself."""

from itertools import pairwise
from typing import get_args

import pytest
import torch
from pairs import pairs
from pydantic import TypeAdapter
from torch import nn

from dpsweep.core.errors import InvalidKey
from dpsweep.core.weight_standardization import StandardConv2d, standardize_weight
from dpsweep.data.datasets import SPECS
from dpsweep.models import ModelConfig, build_model
from dpsweep.models.cnn import Cnn5, CnnPapernot, CnnSmall, LeNet5
from dpsweep.models.huggingface import HuggingFace
from dpsweep.models.mlp import Linear, Mlp4, Mlp4Circulant
from dpsweep.models.own import Own, Timm, Torchvision
from dpsweep.models.parts import saved_tensors
from dpsweep.models.resnet import ResNet18, Wrn16, Wrn28, Wrn40
from dpsweep.models.spectral import Model2, Model3
from dpsweep.models.vit import VitSmall
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients
from dpsweep.privacy.engine.layers import find_black_boxes
from dpsweep.privacy.engine.state_guard import check_stateless

MODELS: list[ModelConfig] = [
    CnnSmall(),
    CnnSmall(width=3),
    CnnSmall(width=5, block=5),
    CnnPapernot(),
    CnnPapernot(block=4),
    Cnn5(),
    LeNet5(),
    LeNet5(block=4),
    Linear(),
    Linear(block=2),
    Mlp4(),
    Mlp4Circulant(),
    ResNet18(width=16),
    VitSmall(width=12, depth=2, heads=3),
    Model2(),
    Model3(),
    Model3(block=8),
    Wrn16(),
    Wrn16(activation="tanh"),
    Wrn16(standardise=True),
    Wrn28(),
    Wrn40(),
]
every_model = pytest.mark.parametrize("config", MODELS, ids=repr)


LARGE = {repr(c) for c in MODELS if isinstance(c, Model2 | LeNet5 | CnnPapernot)}
"""Models to which the digits' images are too small."""


def smallest(config: ModelConfig) -> str:
    """The data set of the smallest images that the model takes."""
    return "mnist" if repr(config) in LARGE else "digits"


def images(data: str, num: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.rand(num, *SPECS[data].shape, generator=rng) * 2 - 1


def test_every_model_is_tested_here():
    elsewhere = {HuggingFace, Torchvision, Timm, Own}  # test_huggingface.py, test_own.py
    ours = set(get_args(get_args(ModelConfig)[0])) - elsewhere
    assert {type(config) for config in MODELS} == ours


@every_model
def test_model_is_found_again_by_its_name(config):
    assert TypeAdapter(ModelConfig).validate_python(config.model_dump()) == config


@pairs(
    config={repr(config): config for config in MODELS},
    data=["digits", "mnist", "cifar10", "cifar100"],
    allowed=lambda config, data: data != "digits" or config not in LARGE,
)
def test_images_give_a_logit_for_each_class(config, data):
    model = build_model(config, SPECS[data], 0)
    assert model(images(data, 2)).shape == (2, SPECS[data].num_classes)


@every_model
def test_logits_of_an_example_do_not_depend_on_its_companions(config):
    data = smallest(config)
    model, batch = build_model(config, SPECS[data], 0), images(data, 6)
    alone = torch.cat([model(image.unsqueeze(0)) for image in batch])
    torch.testing.assert_close(model(batch), alone, rtol=1e-5, atol=1e-6)


@every_model
def test_model_has_no_buffers_that_examples_could_fill(config):
    model = build_model(config, SPECS[smallest(config)], 0)
    assert not list(model.buffers())
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@every_model
def test_weights_come_from_the_public_seed(config):
    one, again, other = (build_model(config, SPECS[smallest(config)], seed) for seed in (0, 0, 1))
    for a, b in zip(one.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any((a != b).any() for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_kind_of_the_head_changes_no_other_weights():
    dense, blocks = (
        build_model(CnnSmall(width=5, block=block), SPECS["digits"], 3).state_dict()
        for block in (None, 5)
    )
    assert blocks["7.weight"].shape == (2, 8, 5)
    assert dense["7.weight"].shape == (10, 40)
    for name in ("0.weight", "0.bias", "3.weight", "3.bias"):
        assert torch.equal(dense[name], blocks[name])


@every_model
def test_building_leaves_torchs_own_generator_alone(config):
    before = torch.get_rng_state()
    build_model(config, SPECS[smallest(config)], 0)
    assert torch.equal(torch.get_rng_state(), before)


@every_model
def test_every_parameter_answers_to_the_loss(config):
    model = build_model(config, SPECS["mnist"], 0)
    torch.nn.functional.cross_entropy(model(images("mnist", 4)), torch.arange(4)).backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()
        assert (p.grad != 0).any()


def num_weights(config: ModelConfig) -> int:
    """The number of weights for CIFAR-10, counted without making them."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config, SPECS["cifar10"], 0).parameters())


@pytest.mark.parametrize(
    "config",
    [
        LeNet5(),
        LeNet5(block=4),
        Linear(),
        Mlp4Circulant(),
        ResNet18(width=16),
        VitSmall(width=12, depth=2, heads=3),
        Cnn5(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_book_keeping_is_right_about_the_model_and_needs_no_vmap(config, data):
    model = build_model(config, SPECS[data], 0)
    check_stateless(model, SPECS[data].shape)
    assert find_wrong_gradients(model, nn.functional.cross_entropy, SPECS[data].shape) is None
    assert find_black_boxes(model) == []


def test_lenet5_has_the_textbook_s_weights():
    with torch.device("meta"):
        model = build_model(LeNet5(), SPECS["mnist"], 0)
    assert [p.numel() for p in model.parameters()] == [
        *(150, 6, 2400, 16),
        *(400 * 120, 120, 120 * 84, 84, 84 * 10, 10),
    ]


def test_cnn_papernot_has_the_printed_number_of_weights_and_works_at_its_smallest():
    with torch.device("meta"):
        model = build_model(CnnPapernot(), SPECS["mnist"], 0)
    assert sum(p.numel() for p in model.parameters()) == 26_010
    assert CnnPapernot().build((1, 14, 14), 10)(torch.zeros(2, 1, 14, 14)).shape == (2, 10)


def test_groups_of_the_linear_model_are_even_within_each_example_and_have_no_weights():
    model = Linear(groups=2).build((4, 3, 3), 10)
    normal = model[0](5 + 3 * torch.rand(6, 4, 3, 3)).unflatten(1, (2, 2))
    torch.testing.assert_close(normal.mean((2, 3, 4)), torch.zeros(6, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.square().mean((2, 3, 4)), torch.ones(6, 2), rtol=1e-3, atol=0)
    assert [name for name, _ in model.named_parameters()] == ["2.weight", "2.bias"]


def test_mlp4_and_its_circulant_twin_have_the_weights_of_the_papers_table():
    sizes = [784 * 2048, 2048, 2048 * 1024, 1024, 1024 * 160, 160, 160 * 10, 10]
    blocks = [8, 1, 8, 1, 8, 1, 10, 1]
    with torch.device("meta"):
        dense, circulant = (build_model(c, SPECS["mnist"], 0) for c in (Mlp4(), Mlp4Circulant()))
    assert [p.numel() for p in dense.parameters()] == sizes
    assert [p.numel() for p in circulant.parameters()] == [
        n // d for n, d in zip(sizes, blocks, strict=True)
    ]


def test_resnet18_has_as_many_weights_as_the_usual_one_for_small_images():
    assert num_weights(ResNet18()) == 11_173_962  # kuangliu/pytorch-cifar's, with batch norm


def test_vit_small_has_the_papers_weights_but_for_token_and_patches():
    block = 2 * 2 * 384 + 3 * 384 * 384 + 3 * 384 + 384 * 384 + 384 + 8 * 384 * 384 + 5 * 384
    patches, places = 384 * 3 * 16 + 384, 64 * 384
    assert num_weights(VitSmall()) == patches + places + 12 * block + 2 * 384 + 384 * 10 + 10


@pytest.mark.parametrize(
    ("shape", "patch"), [((1, 28, 28), 4), ((3, 32, 32), 4), ((3, 64, 64), 8), ((3, 224, 224), 16)]
)
def test_patch_follows_the_side_of_the_images(shape, patch):
    config = VitSmall(width=4, depth=1, heads=1)
    assert config.patch_side(shape) == patch
    with torch.device("meta"):
        model = config.build(shape, 10)
    assert model[0].places.num_embeddings == (shape[1] // patch) ** 2


def test_places_of_patches_are_told_apart():
    model = build_model(VitSmall(width=12, depth=1, heads=3), SPECS["digits"], 0)
    image = images("digits", 1)
    assert (model(image) - model(image.flip(3))).abs().max() > 1e-3


def test_standardised_kernels_have_mean_zero_and_their_size_changes_nothing():
    conv = StandardConv2d(3, 5, 3, padding=1, bias=False)
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    kernel = standardize_weight(conv.weight.detach())
    torch.testing.assert_close(kernel.mean((1, 2, 3)), torch.zeros(5), atol=1e-6, rtol=0)
    sizes = kernel.square().sum((1, 2, 3))
    assert ((sizes > 0.9) & (sizes < 1)).all()  # 1 but for what keeps the root away from 0
    before = conv(images)
    torch.testing.assert_close(before, nn.functional.conv2d(images, kernel, padding=1))
    with torch.no_grad():
        conv.weight.mul_(1000).add_(3)
    torch.testing.assert_close(conv(images), before, rtol=0.1, atol=0.02)


def test_cnn5_has_about_the_papers_number_of_weights():
    assert num_weights(Cnn5()) == pytest.approx(412_000, rel=0.01)


def conv(inputs: int, outputs: int) -> int:
    """Weights of a 3x3 convolution with biases."""
    return 9 * inputs * outputs + outputs


def test_model2_has_the_weights_of_the_papers_table():
    channels = (3, 32, 64, 64, 64, 10)
    convs = [conv(*pair) for pair in pairwise(channels)]
    assert num_weights(Model2()) == sum(convs) == 99_018


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        (Model3(), 2048 * 120, 120 * 10),
        (Model3(block=8), 2048 * 120 // 8, 120 * 10 // 10),  # the paper's blocks
        (Model3(block=4, head_block=5), 2048 * 120 // 4, 120 * 10 // 5),
    ],
)
def test_model3_has_the_weights_of_the_papers_table(config, first, second):
    channels = (3, 32, 32, 64, 64, 128, 128)
    convs = [conv(*pair) for pair in pairwise(channels)]
    assert num_weights(config) == sum(convs) + first + 120 + second + 10


@pytest.mark.parametrize(
    ("config", "num"), [(Wrn16(), 2_748_890), (Wrn28(), 5_849_050), (Wrn40(), 8_949_210)]
)
def test_wide_residual_network_has_as_many_weights_as_with_batch_norm(config, num):
    # Zagoruyko & Komodakis's table 4 gives 8.9M for WRN-40-4. By hand, with n pairs of
    # convolutions in a stage of width w, a shortcut from width v, and two numbers a channel for
    # each norm, two norms a pair:
    pairs = {"wrn_16_4": 2, "wrn_28_4": 4, "wrn_40_4": 6}[config.name]
    stages = sum(
        9 * v * w + (2 * pairs - 1) * 9 * w * w + v * w + 2 * v + (2 * pairs - 1) * 2 * w
        for v, w in ((16, 64), (64, 128), (128, 256))
    )
    assert num_weights(config) == 9 * 3 * 16 + stages + 2 * 256 + 256 * 10 + 10 == num


def test_activation_of_a_wide_residual_network_changes_no_weights_and_nothing_in_place():
    relu, tanh = (
        build_model(Wrn16(activation=activation), SPECS["digits"], 0)
        for activation in ("relu", "tanh")
    )
    for a, b in zip(relu.parameters(), tanh.parameters(), strict=True):
        assert torch.equal(a, b)
    kinds = [{type(m) for m in model.modules()} & {nn.ReLU, nn.Tanh} for model in (relu, tanh)]
    assert kinds == [{nn.ReLU}, {nn.Tanh}]
    assert not any(getattr(m, "inplace", False) for m in relu.modules())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 9, 14), (2, 33, 8), (3, 4, 4)])
def test_wide_residual_network_takes_images_of_any_shape(shape):
    assert Wrn16().build(shape, 7)(torch.rand(2, *shape)).shape == (2, 7)


def test_stages_of_a_wide_residual_network_halve_the_sides_twice():
    sizes = []
    model = Wrn16().build((3, 32, 32), 10)
    for layer in model:
        layer.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape[1:])))
    model(torch.rand(1, 3, 32, 32))
    assert sizes[1:7:2] == sizes[2:7:2] == [(64, 32, 32), (128, 16, 16), (256, 8, 8)]


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (CnnSmall(), (81, 2, 2), r"halved 2 times, .* at least 4 x 4 pixels, got 2 x 2\. Choose"),
        (CnnPapernot(), (1, 28, 13), r"at least 14 x 14 pixels, got 28 x 13\. Choose"),
        (LeNet5(), (1, 28, 11), r"at least 12 x 12 pixels, got 28 x 11\. Choose"),
        (ResNet18(), (3, 7, 32), r"halved 3 times, .* at least 8 x 8 pixels, got 7 x 32\. Choose"),
        (Wrn28(), (3, 3, 32), r"halved 2 times, .* at least 4 x 4 pixels, got 3 x 32\. Choose"),
        (Model2(), (1, 8, 8), r"halved 4 times, .* at least 16 x 16 pixels, got 8 x 8\. Choose"),
        (Model3(), (3, 8, 7), r"halved 3 times, .* at least 8 x 8 pixels, got 8 x 7\. Choose"),
    ],
)
def test_images_too_small_to_halve_are_refused(config, shape, message):
    with pytest.raises(ValueError, match=message):
        config.build(shape, 10)


@pytest.mark.parametrize(
    ("config", "num_classes", "key", "message"),
    [
        (
            CnnSmall(width=5, block=3),
            10,
            "block",
            r"^block must divide .* = 40 and .* = 10, got 3\.",
        ),
        (
            Model3(block=7),
            10,
            "block",
            r"^block must divide .* in_features = 128 and .* = 120, got 7\.",
        ),
        (VitSmall(patch=3), 10, "patch", r"^3 does not divide the sides of images of 8 x 8 pixels"),
        (VitSmall(width=10, heads=3), 10, "heads", r"^3 does not divide model.width: 10$"),
        (Linear(groups=3), 10, "groups", r"^3 groups do not divide the 1 channels evenly\."),
        (Linear(block=3), 10, "block", r"^block must divide .* = 64 and .* = 10, got 3\."),
        (
            Model3(block=8),
            4,
            "head_block",
            r"^head_block must divide .* = 120 and .* = 4, got 10\. Blocks that fit: 1, 2, 4\.$",
        ),
    ],
)
def test_block_that_does_not_divide_is_refused_by_its_key(config, num_classes, key, message):
    with pytest.raises(InvalidKey, match=message) as caught:
        config.build((1, 8, 8), num_classes)
    assert caught.value.key == key


@every_model
def test_saved_tensors_are_those_of_a_state_dict_in_its_order(config):
    with torch.device("meta"):
        model = build_model(config, SPECS["cifar10"], 0)
    found, expected = saved_tensors(model), model.state_dict(keep_vars=True)
    assert list(found) == list(expected)
    assert all(x is expected[k] for k, x in found.items())


def test_saved_tensors_of_layers_that_are_shared_and_of_buffers_that_pass():
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    other.weight = layer.weight
    model = nn.Sequential(layer, nn.Sequential(layer), other, nn.BatchNorm1d(2))
    model.register_buffer("passing", torch.ones(1), persistent=False)
    model.register_buffer("absent", None)
    expected = model.state_dict()
    assert list(saved_tensors(model)) == list(expected)
    model.register_state_dict_post_hook(lambda _, found, *__: found.clear())
    assert not model.state_dict()
    assert list(saved_tensors(model)) == list(expected)
