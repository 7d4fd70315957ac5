"""Kernels answer alike in both forms, over every layout that a convolution can have."""

import math
from itertools import product

import pytest
import torch
from oracle import BOTH_SIGNS, check, draw, gradients, single, spoiled, squared_norms, uses_of
from pairs import pairs
from torch import Tensor, nn

from dpsweep.privacy.engine.conv import GhostNormKernels, PhaseLayout, WrittenOutKernels
from dpsweep.privacy.engine.layers import conv2d
from dpsweep.privacy.engine.records import LayerCall

IMAGE = (11, 9)  # odd, and just wide enough for the widest kernel without padding
WIDE = {"kernel_size": 5, "dilation": 2}
KERNELS = [1, 2, 3, (3, 2), 5]
STRIDES = [1, 2, 3, (2, 1)]
DILATIONS = [1, 2, (2, 1)]
PADDINGS = [0, 1, "same", "valid", (2, 1)]
MODES = ["zeros", "reflect", "replicate", "circular"]
GROUPS = {
    "narrower": (4, 3, 1),
    "wider": (2, 3, 1),
    "in two": (4, 6, 2),
    "in two, narrower": (4, 2, 2),
    "depthwise": (3, 6, 3),
}
# The place of a lag depends on all four of kernel, stride, dilation and padding, and so each of
# their combinations is here; channels and modes meet every value of each, and each other.
LAYOUTS = [
    (
        {"kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": padding},
        list(GROUPS)[(k + s + 2 * d + 3 * p) % len(GROUPS)],
        MODES[(k + 2 * s + d + p) % len(MODES)],
    )
    for (k, kernel), (s, stride), (d, dilation), (p, padding) in product(
        *map(enumerate, (KERNELS, STRIDES, DILATIONS, PADDINGS))
    )
    if padding != "same" or stride == 1  # torch has no others
]
FORMS = {"lags": WrittenOutKernels, "gram": GhostNormKernels}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
both_forms = pytest.mark.parametrize("form", FORMS)


def forced(monkeypatch, form: str) -> None:
    monkeypatch.setattr(PhaseLayout, "cheaper_by_gram", lambda *_: form == "gram")


def layer(channels: tuple[int, int, int] = (2, 3, 1), **options) -> nn.Conv2d:
    inside, out, groups = channels
    options = {"kernel_size": 3, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Conv2d(inside, out, groups=groups, **options, dtype=torch.float64)


def used(
    conv: nn.Conv2d, weights=BOTH_SIGNS, num: int = 3, image=IMAGE, last=True
) -> list[LayerCall]:
    inputs = [draw(num, conv.in_channels, *image, seed=m) for m in range(len(weights))]
    if last:
        inputs = [x.contiguous(memory_format=torch.channels_last) for x in inputs]
    return uses_of(conv, weights, [(x,) for x in inputs])


def answers(conv: nn.Conv2d, uses: list[LayerCall]) -> dict:
    return conv2d(conv, uses, frozenset(k for k, _ in conv.named_parameters()))


def some_in_double(factor_B: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    """Those of a factor above 1, and the others."""
    return torch.where(factor_B > 1, factor_B, 0), torch.where(factor_B > 1, 0, factor_B)


@pytest.mark.parametrize(
    ("layout", "groups", "mode"),
    LAYOUTS,
    ids=["-".join(map(str, [*layout.values(), groups, mode])) for layout, groups, mode in LAYOUTS],
)
def test_every_layout_answers_as_autograd_in_both_forms(monkeypatch, layout, groups, mode):
    conv = layer(GROUPS[groups], **layout, padding_mode=mode, bias=False)
    uses = used(conv)
    expected_B = gradients(conv, uses)["weight"]
    for form, kind in FORMS.items():
        forced(monkeypatch, form)
        found = answers(conv, uses)["weight"]
        assert isinstance(found, kind)
        check(found, expected_B, case=form)
    with monkeypatch.context() as patch:
        patch.setattr("dpsweep.privacy.engine.gradients.split_by_cancellation", some_in_double)
        found = answers(conv.float(), single(uses))["weight"]
        check(found, expected_B.float(), case="by gram, one summed in double")


@pairs(
    mode=MODES,
    groups=GROUPS.keys(),
    kernel=[3, (3, 2)],
    padding=[1, "same", (2, 1)],
    bias={"bias": True, "no bias": False},
    form=FORMS.keys(),
)
def test_every_padding_mode_answers_as_autograd(
    monkeypatch, mode, groups, kernel, padding, bias, form
):
    forced(monkeypatch, form)
    layout = {"kernel_size": kernel, "padding": padding, "padding_mode": mode}
    conv = layer(GROUPS[groups], **layout, bias=bias)
    uses = used(conv)
    found, expected = answers(conv, uses), gradients(conv, uses)
    assert set(found) == set(expected)
    for key, leaf_B in expected.items():
        check(found[key], leaf_B, case=key)


@pairs(
    stride=[1, 2],
    groups=GROUPS.keys(),
    last={"channels last": True, "contiguous": False},
    form=FORMS.keys(),
)
def test_memory_layout_changes_nothing(monkeypatch, stride, groups, last, form):
    forced(monkeypatch, form)
    conv = layer(GROUPS[groups], stride=stride, padding=1)
    uses = used(conv, last=last)
    assert uses[0].inputs[0].is_contiguous(memory_format=torch.channels_last) == last
    check(answers(conv, uses)["weight"], gradients(conv, uses)["weight"])


@pairs(
    weights={"one": [1.0], "two": [-3.7, 4.7], "three": BOTH_SIGNS},
    groups=GROUPS.keys(),
    form=FORMS.keys(),
)
def test_single_precision_is_as_good_as_autograds(monkeypatch, weights, groups, form):
    forced(monkeypatch, form)
    conv = layer(GROUPS[groups], stride=(2, 1), padding=1)
    uses = single(used(conv, weights))
    found = answers(conv.float(), uses)["weight"]
    check(found, gradients(conv, uses)["weight"])


@both_forms
@pytest.mark.parametrize("num", [1, 7])
def test_number_of_examples_is_free(monkeypatch, num, form):
    forced(monkeypatch, form)
    conv = layer(GROUPS["in two"], padding=1)
    uses = used(conv, num=num)
    check(answers(conv, uses)["weight"], gradients(conv, uses)["weight"])


@both_forms
@pairs(
    image=[(1, 1), (1, 8), (5, 1), (3, 2), (5, 4)],
    layout={
        "square": {"kernel_size": 3},
        "dilated": {"kernel_size": (3, 5), "dilation": (2, 1)},
    },
    padding=[1, "same"],
    groups=GROUPS.keys(),
)
def test_images_may_be_smaller_than_the_kernel(monkeypatch, image, layout, padding, groups, form):
    if padding == 1 and "dilation" in layout:
        padding = (2, 2)  # what "same" comes to, in numbers
    forced(monkeypatch, form)
    conv = layer(GROUPS[groups], padding=padding, **layout)
    uses = used(conv, image=image)
    check(answers(conv, uses)["weight"], gradients(conv, uses)["weight"])


@pytest.mark.parametrize("layout", [{"stride": 2}, {"padding": 1}], ids=["strided", "padded"])
@pytest.mark.parametrize("channels", [(2, 3, 1), (3, 2, 1)], ids=["wider", "narrower"])
def test_layer_called_on_images_of_two_sizes_is_written_out(monkeypatch, channels, layout):
    forced(monkeypatch, "gram")
    conv = layer(channels, **layout)
    uses = used(conv, [0.3]) + used(conv, [-2.0], image=(6, 8))
    found = answers(conv, uses)["weight"]
    assert isinstance(found, WrittenOutKernels)
    check(found, gradients(conv, uses)["weight"])


@pairs(
    groups=GROUPS.keys(),
    where=["input", "gradient"],
    bad=[math.nan, math.inf],
    form=FORMS.keys(),
)
def test_example_that_is_not_finite_leaves_the_others_as_they_are(
    monkeypatch, groups, where, bad, form
):
    forced(monkeypatch, form)
    conv = layer(GROUPS[groups], padding=1)
    sound = used(conv, last=False)
    expected_B = gradients(conv, sound)["weight"]
    found = answers(conv, spoiled(sound, bad, where))["weight"]
    squares_B = found.squares()
    assert not squares_B[1].isfinite()
    torch.testing.assert_close(squares_B[::2], squared_norms(expected_B)[::2])
    factor_B = torch.tensor([0.7, 0.0, 1.3], dtype=torch.float64)
    expected = torch.tensordot(factor_B, expected_B, dims=1)
    torch.testing.assert_close(found.sum_scaled(factor_B), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wanted", [{"weight"}, {"bias"}, {"weight", "bias"}], ids=sorted)
def test_only_what_is_wanted_is_answered(wanted):
    conv = layer()
    assert set(conv2d(conv, used(conv), frozenset(wanted))) == wanted


def test_form_is_chosen_by_what_it_costs():
    def form(channels: int, side: int, points: int = 1) -> type:
        conv = layer((channels, channels, 1), padding=1)
        return type(answers(conv, used(conv, [1.0] * points, image=(side, side)))["weight"])

    assert form(channels=64, side=2) is GhostNormKernels  # few positions, many weights
    assert form(channels=2, side=24) is WrittenOutKernels  # many positions, few weights
    assert form(channels=32, side=4, points=1) is GhostNormKernels
    assert (
        form(channels=32, side=4, points=8) is WrittenOutKernels
    )  # pairs of points grow as their square


def test_one_run_covers_the_lags_of_the_widest_kernel():
    conv = layer(**WIDE)
    runs = PhaseLayout.of(conv, torch.Size((3, 3, 3, 1)))
    assert runs.phase == IMAGE
    assert runs.length == 2 * 9 + 1
    assert runs.lags[-1] == ((0, 0), 8 * 9 + 8)
    assert runs.lags[-1][1] + runs.length == math.prod(IMAGE)  # the last window ends the image
