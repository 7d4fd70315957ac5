"""Spectra of circulant generators answer as the generators' gradients by autograd."""

import math

import pytest
import torch
from oracle import (
    BOTH_SIGNS,
    QUERIES,
    check,
    draw,
    gradients,
    single,
    spoiled,
    squared_norms,
    uses_of,
)
from pairs import pairs

from dpsweep.core.circulant import CirculantLinear
from dpsweep.privacy.engine.circulant import CirculantGradients
from dpsweep.privacy.engine.gradients import ParameterGradients, WrittenOut
from dpsweep.privacy.engine.layers import circulant
from dpsweep.privacy.engine.records import LayerCall

BLOCKS = [1, 2, 3, 4, 5, 12]  # 1 and 2 have no pair of frequencies; odd ones no Nyquist
every_block = pytest.mark.parametrize("block", BLOCKS)
FORMS = ["spectra", "written out"]
every_form = pytest.mark.parametrize("form", FORMS)


def layer(block: int, bias: bool = True) -> CirculantLinear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return CirculantLinear(2 * block, 3 * block, block, bias).double()


def used(layer: CirculantLinear, weights=BOTH_SIGNS, positions=(5,)) -> list[LayerCall]:
    shape = (3, *positions, layer.in_features)
    return uses_of(layer, weights, [(draw(*shape, seed=m),) for m in range(len(weights))])


def answers(layer: CirculantLinear, uses: list[LayerCall]) -> dict[str, ParameterGradients]:
    return circulant(layer, uses, frozenset(k for k, _ in layer.named_parameters()))


@pairs(
    block=BLOCKS,
    bias={"bias": True, "no bias": False},
    positions=[(), (5,), (2, 3)],
    weights=QUERIES,
)
@every_form
def test_layer_answers_as_autograd(monkeypatch, form, block, bias, positions, weights):
    monkeypatch.setattr(CirculantGradients, "ghost_norm_is_cheaper", form == "spectra")
    blocks = layer(block, bias)
    uses = used(blocks, weights, positions)
    found, expected = answers(blocks, uses), gradients(blocks, uses)
    assert isinstance(found["weight"], CirculantGradients if form == "spectra" else WrittenOut)
    assert set(found) == set(expected)
    for key, leaf_B in expected.items():
        check(found[key], leaf_B, case=key)


@every_form
@every_block
def test_calls_with_different_numbers_of_positions_add_up(monkeypatch, form, block):
    monkeypatch.setattr(CirculantGradients, "ghost_norm_is_cheaper", form == "spectra")
    blocks = layer(block)
    uses = used(blocks, [0.5]) + used(blocks, BOTH_SIGNS, positions=(2, 4))
    found = answers(blocks, uses)
    for key, leaf_B in gradients(blocks, uses).items():
        check(found[key], leaf_B, case=key)


@pairs(form=FORMS, block=BLOCKS, weights=QUERIES)
def test_single_precision_is_as_good_as_autograds(monkeypatch, form, block, weights):
    monkeypatch.setattr(CirculantGradients, "ghost_norm_is_cheaper", form == "spectra")
    uses = single(used(layer(block), weights))
    found = answers(layer(block), uses)
    for key, leaf_B in gradients(layer(block).float(), uses).items():
        check(found[key], leaf_B, case=key)


@pairs(form=FORMS, block=BLOCKS, bad=[math.nan, math.inf], where=["input", "gradient"])
def test_example_that_is_not_finite_leaves_the_others_as_they_are(
    monkeypatch, form, block, bad, where
):
    monkeypatch.setattr(CirculantGradients, "ghost_norm_is_cheaper", form == "spectra")
    blocks = layer(block)
    sound = used(blocks)
    expected_B = gradients(blocks, sound)["weight"]
    found = answers(blocks, spoiled(sound, bad, where))["weight"]
    squares_B = found.squares()
    assert not squares_B[1].isfinite()
    torch.testing.assert_close(squares_B[::2], squared_norms(expected_B)[::2])
    factor_B = torch.tensor([0.7, 0.0, 1.3], dtype=torch.float64)
    expected = torch.tensordot(factor_B, expected_B, dims=1)
    torch.testing.assert_close(found.sum_scaled(factor_B), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wanted", [{"weight"}, {"bias"}], ids=sorted)
def test_only_what_is_wanted_is_answered(wanted):
    assert set(circulant(layer(3), used(layer(3)), frozenset(wanted))) == wanted


@pytest.mark.parametrize(
    ("num", "positions", "stays"),
    [(1, (), True), (2, (), True), (1, (2,), True), (1, (64,), False)],
)
def test_form_is_the_cheaper_one(num, positions, stays):
    wide = CirculantLinear(64, 64, block=8).double()
    weight = answers(wide, used(wide, [1.0] * num, positions))["weight"]
    assert isinstance(weight, CirculantGradients if stays else WrittenOut)


def test_norm_covers_an_answer_that_is_all_rounding():
    """Input and gradient share no frequency, so that only what transforms round is left."""
    wave = torch.arange(12) * (2 * math.pi / 12)
    use = LayerCall(1.0, (1e3 * wave.cos()[None],), 1e3 * (2 * wave).sin()[None], {})
    (rounded,) = single([use])
    found = answers(CirculantLinear(12, 12, block=12), [rounded])["weight"]
    norm = found.sum_scaled(torch.ones(1)).norm().item()
    assert 0 < norm <= (1 + 1e-3) * found.squares().sqrt().item()
