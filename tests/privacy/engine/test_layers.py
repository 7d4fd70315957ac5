"""Each kind of layer answers as autograd does, in each of its forms; and which layers have a rule.

Convolutions are in test_conv.py, circulant blocks in test_circulant.py, attention in
test_attention.py.
"""

import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from oracle import (
    BOTH_SIGNS,
    QUERIES,
    check,
    draw,
    generator,
    gradients,
    single,
    spoiled,
    squared_norms,
    uses_of,
)
from pairs import pairs
from torch import Tensor, nn

from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.weight_standardization import StandardConv2d
from dpsweep.privacy.engine import layers
from dpsweep.privacy.engine.gradients import OuterProducts, ParameterGradients, WrittenOut
from dpsweep.privacy.engine.layers import (
    find_black_boxes,
    find_rule,
    find_sites,
    find_written_out,
    merge_calls,
)
from dpsweep.privacy.engine.records import LayerCall

NUM = 3


class Odd(nn.Module):
    """No rule fits: parameters of its own, a layer inside, two inputs, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.inner = nn.Linear(4, 3)
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.scale * self.inner(left.sin()) * right.exp() + self.shift


def rows(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of rows of a table of 5, the padding's among them, most of them more than once."""
    return torch.randint(0, 5, (NUM, *shape), generator=generator(seed))


LAYERS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "linear": (lambda: nn.Linear(4, 3), [(4,)]),
    "linear, one axis of positions": (lambda: nn.Linear(4, 3), [(5, 4)]),
    "linear, two axes": (lambda: nn.Linear(4, 3), [(2, 3, 4)]),
    "linear, no bias": (lambda: nn.Linear(4, 3, bias=False), [(5, 4)]),
    "linear to one": (lambda: nn.Linear(1, 1), [(2, 1)]),
    "layer norm": (lambda: nn.LayerNorm(4, eps=0.1), [(4,)]),
    "layer norm, positions": (lambda: nn.LayerNorm(4), [(2, 3, 4)]),
    "layer norm, two axes": (lambda: nn.LayerNorm((3, 4)), [(3, 4)]),
    "layer norm, two axes, positions": (lambda: nn.LayerNorm((3, 4), eps=0.1), [(2, 3, 4)]),
    "layer norm, no bias": (lambda: nn.LayerNorm(4, bias=False), [(5, 4)]),
    "RMS norm": (lambda: nn.RMSNorm(4), [(5, 4)]),
    "RMS norm, two axes, positions": (lambda: nn.RMSNorm((3, 4), eps=0.1), [(2, 3, 4)]),
    "group norm": (lambda: nn.GroupNorm(2, 4), [(4, 3, 5)]),
    "group norm, vectors": (lambda: nn.GroupNorm(2, 4, eps=0.1), [(4,)]),
    "group norm, volumes": (lambda: nn.GroupNorm(1, 4), [(4, 2, 3, 2)]),
    "embedding": (lambda: nn.Embedding(5, 4), []),
    "embedding with padding": (lambda: nn.Embedding(5, 4, padding_idx=2), []),
    "embedding, padding from behind": (lambda: nn.Embedding(5, 4, padding_idx=-1), []),
    "black box": (Odd, [(5, 4), (5, 3)]),
    "black box of torch's": (lambda: nn.PReLU(4), [(4, 5)]),
    "black box, bilinear": (lambda: nn.Bilinear(4, 2, 3), [(4,), (2,)]),
}
if find_spec("transformers") is not None:  # of the extra `text`
    Conv1D = import_module("transformers.pytorch_utils").Conv1D
    LAYERS["transposed linear"] = (lambda: Conv1D(3, 4), [(5, 4)])
SPOILT = [(kind, "gradient") for kind in LAYERS] + [
    (kind, "input") for kind, (_, shapes) in LAYERS.items() if shapes
]
every_layer = pytest.mark.parametrize("kind", LAYERS)
FORMS = {"as records": True, "written out": False}
every_form = pytest.mark.parametrize("cheap", FORMS.values(), ids=FORMS)
pytestmark = pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule")


def built(kind: str) -> nn.Module:
    make, _ = LAYERS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = make().double()
        for p in layer.parameters():  # norms begin at ones and zeros, which hide mistakes
            nn.init.normal_(p)
    return layer


def used(kind: str, layer: nn.Module, weights=BOTH_SIGNS) -> list[LayerCall]:
    given = [
        tuple(draw(NUM, *shape, seed=10 * m + i) for i, shape in enumerate(LAYERS[kind][1]))
        or (rows(7, seed=m),)
        for m in range(len(weights))
    ]
    return uses_of(layer, weights, given, apart=0.2 if "black box" in kind else 0.0)


def answers(layer: nn.Module, uses: list[LayerCall]) -> dict[str, ParameterGradients]:
    wanted = frozenset(k for k, _ in layer.named_parameters())
    return (find_rule(layer) or layers.black_box)(layer, uses, wanted)


@pairs(kind=LAYERS.keys(), weights=QUERIES, cheap=FORMS)
def test_layer_answers_as_autograd(monkeypatch, kind, weights, cheap):
    monkeypatch.setattr(OuterProducts, "ghost_norm_is_cheaper", cheap)
    layer = built(kind)
    uses = used(kind, layer, weights)
    found, expected = answers(layer, uses), gradients(layer, uses)
    assert set(found) == set(expected)
    for key, leaf_B in expected.items():
        check(found[key], leaf_B, case=key)


@every_form
@every_layer
def test_layer_called_twice_at_each_point_answers_with_the_sum(monkeypatch, kind, cheap):
    monkeypatch.setattr(OuterProducts, "ghost_norm_is_cheaper", cheap)
    layer = built(kind)
    uses = used(kind, layer, [0.5, 0.5]) + used(kind, layer, BOTH_SIGNS)
    found, expected = answers(layer, uses), gradients(layer, uses)
    for key, leaf_B in expected.items():
        check(found[key], leaf_B, case=key)


@every_form
@every_layer
def test_single_precision_is_as_good_as_autograds(monkeypatch, kind, cheap):
    monkeypatch.setattr(OuterProducts, "ghost_norm_is_cheaper", cheap)
    layer = built(kind)
    uses = single(used(kind, layer))
    layer.float()
    found = answers(layer, uses)
    for key, leaf_B in gradients(layer, uses).items():
        check(found[key], leaf_B, case=key)


@pairs(spoilt={f"{kind}, {where}": (kind, where) for kind, where in SPOILT},
       bad=[math.nan, math.inf], cheap=FORMS)  # fmt: skip
def test_example_that_is_not_finite_leaves_the_others_as_they_are(monkeypatch, spoilt, bad, cheap):
    kind, where = spoilt
    monkeypatch.setattr(OuterProducts, "ghost_norm_is_cheaper", cheap)
    layer = built(kind)
    sound = used(kind, layer)
    found, theirs = (f(layer, spoiled(sound, bad, where)) for f in (answers, gradients))
    for key, leaf_B in theirs.items():
        assert found[key].squares()[1].isfinite() == leaf_B[1].isfinite().all()
    factor_B = torch.tensor([0.7, 0.0, 1.3], dtype=torch.float64)
    for key, leaf_B in gradients(layer, sound).items():
        squares_B = found[key].squares().double()
        torch.testing.assert_close(squares_B[::2], squared_norms(leaf_B)[::2])
        expected = torch.tensordot(factor_B, leaf_B, dims=1)
        torch.testing.assert_close(
            found[key].sum_scaled(factor_B), expected, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("kind", ["linear", "layer norm", "group norm", "black box of torch's"])
def test_only_what_is_wanted_is_answered(kind):
    layer = built(kind)
    uses = used(kind, layer)
    rule = find_rule(layer) or layers.black_box
    for key, _ in layer.named_parameters():
        assert set(rule(layer, uses, frozenset({key}))) == {key}


def test_parameter_that_is_not_wanted_stays_fixed_in_a_black_box():
    layer = built("black box")
    uses = used("black box", layer)
    found = layers.black_box(layer, uses, frozenset({"scale"}))
    check(found["scale"], gradients(layer, uses)["scale"])


def test_long_sequences_of_narrow_layers_are_written_out():
    def form(length: int, width: int) -> type:
        layer = nn.Linear(width, width, dtype=torch.float64)
        uses = uses_of(layer, [1.0], [(draw(2, length, width),)])
        return type(answers(layer, uses)["weight"])

    assert form(length=1, width=4) is OuterProducts
    assert form(length=4, width=64) is OuterProducts
    assert form(length=64, width=4) is WrittenOut


def test_sites_go_down_to_what_has_a_rule_or_owns_parameters():
    attention = nn.MultiheadAttention(4, 2)
    model = nn.ModuleDict(
        {
            "block": nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), CirculantLinear(4, 4, 2)),
            "attention": attention,
            "odd": Odd(),
            "plain": nn.LayerNorm(4, elementwise_affine=False),
        }
    )
    found = find_sites(model)
    assert {name: site.called for name, site in found.items()} == {
        "block.0": "block.0",
        "block.2": "block.2",
        "attention/in": "attention",
        "attention/out": "attention",
        "odd": "odd",
    }
    assert found["odd"].params == {
        "odd.scale": "scale",
        "odd.inner.weight": "inner.weight",
        "odd.inner.bias": "inner.bias",
    }
    assert find_black_boxes(model) == ["'odd' (Odd)"]


def test_site_of_a_shared_parameter_has_the_models_name_for_it():
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "out": nn.Linear(4, 5)})
    model["out"].weight = model["table"].weight
    found = find_sites(model)
    assert found["out"].params == {"table.weight": "weight", "out.bias": "bias"}


def test_subclass_may_compute_something_else_and_is_a_black_box():
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert find_black_boxes(nn.Sequential(Doubled(4, 3))) == ["'0' (Doubled)"]


@pytest.mark.skipif("transposed linear" not in LAYERS, reason="needs the extra text")
def test_gpt2s_layer_has_a_rule_and_its_subclass_none():
    class Doubled(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert find_black_boxes(nn.Sequential(Conv1D(3, 4))) == []
    assert find_black_boxes(nn.Sequential(Doubled(3, 4))) == ["'0' (Doubled)"]


def test_kernels_and_black_boxes_may_be_written_out():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 3), nn.PReLU(3))
    assert {id(p) for p in find_written_out(model)} == {
        id(p) for i in (0, 2) for p in model[i].parameters()
    }


FIRST = {
    "linear": (nn.Linear(5, 3), (draw(NUM, 5),)),
    "circulant": (CirculantLinear(8, 8, 4), (draw(NUM, 8),)),
}
SEVERAL = {
    "linear over positions": (nn.Linear(5, 3), (draw(NUM, 4, 5),)),
    "conv": (nn.Conv2d(2, 3, 3, padding=1), (draw(NUM, 2, 5, 5),)),
    "standardised conv": (StandardConv2d(2, 3, 3), (draw(NUM, 2, 5, 5),)),
    "embedding": (nn.Embedding(5, 3, padding_idx=0), (rows(4),)),
    "circulant over positions": (CirculantLinear(8, 8, 4), (draw(NUM, 3, 8),)),
    "norm of one vector": (nn.LayerNorm(5), (draw(NUM, 5),)),
}


@pytest.mark.parametrize("kind", FIRST)
def test_points_with_the_very_same_input_are_one_position(kind):
    layer, given = FIRST[kind]
    layer = layer.double()
    site = find_sites(layer)[""]
    uses = uses_of(layer, BOTH_SIGNS, [given] * 3, apart=0.1)
    (one,) = merge_calls(
        site, [LayerCall(u.weight, (given[0].detach(),), u.grad, u.params) for u in uses]
    )
    factors = torch.tensor([0.3, 0.0, 1.0])
    for name, answer in site.rule(layer, uses, frozenset(site.params.values())).items():
        same = site.rule(layer, [one], frozenset(site.params.values()))[name]
        torch.testing.assert_close(same.squares(), answer.squares())
        torch.testing.assert_close(same.sum_scaled(factors), answer.sum_scaled(factors))


def test_points_with_inputs_of_their_own_stay_apart():
    layer, (given,) = FIRST["linear"]
    layer = layer.double()
    uses = uses_of(layer, BOTH_SIGNS, [(given,), (given.clone(),), (given,)])
    merged = merge_calls(find_sites(layer)[""], uses)
    assert [use.weight for use in merged] == [1.0, BOTH_SIGNS[1]]
    expected = BOTH_SIGNS[0] * uses[0].grad + BOTH_SIGNS[2] * uses[2].grad
    torch.testing.assert_close(merged[0].grad, expected)
    assert merged[1] is uses[1]


@pytest.mark.parametrize("kind", SEVERAL)
def test_positions_that_may_cancel_and_answers_that_depend_on_the_point_stay_apart(kind):
    layer, given = SEVERAL[kind]
    layer = layer.double()
    uses = uses_of(layer, BOTH_SIGNS, [given] * 3, apart=0.1)
    assert merge_calls(find_sites(layer)[""], uses) == uses


def test_two_views_of_one_storage_with_other_signs_are_two_inputs():
    layer = nn.Linear(5, 3)
    complex_ = torch.randn(NUM, 5, dtype=torch.complex64, generator=generator())
    views = complex_.imag, complex_.conj().imag
    uses = [LayerCall(1.0, (view,), torch.ones(NUM, 3), {}) for view in views]
    assert len(merge_calls(find_sites(layer)[""], uses)) == 2
