"""Answers in their several forms say the same, and never a norm that is too small.

Float32 keeps 2^-24 of what it sums. Where positions or points cancel, the sum that is clipped
is all rounding error, and a norm from Gram matrices must cover that error too.
"""

import math

import pytest
import torch
from oracle import check, draw, generator, squared_norms
from pairs import pairs
from torch import Tensor, nn

from dpsweep.core.circulant import CirculantLinear
from dpsweep.privacy.clip import Automatic, Flat, compute_factors
from dpsweep.privacy.engine.circulant import CirculantGradients
from dpsweep.privacy.engine.conv import GhostNormKernels, PhaseLayout, WrittenOutKernels
from dpsweep.privacy.engine.gradients import (
    EmbeddingRows,
    OuterProducts,
    ParameterGradients,
    TiedRows,
    WrittenOut,
    add_shared,
    compute_gram,
    square_norms,
    square_norms_from_grams,
)
from dpsweep.privacy.engine.layers import circulant, conv2d, embedding, linear
from dpsweep.privacy.engine.records import LayerCall

NUM, C = 40, 0.5
WEIGHT = frozenset({"weight"})
FORMS = {
    "outer": OuterProducts,
    "outer written out": WrittenOut,
    "tokens": EmbeddingRows,
    "conv by gram": GhostNormKernels,
    "conv by lags": WrittenOutKernels,
    "circulant": CirculantGradients,
    "circulant written out": WrittenOut,
}
FACTORS = torch.tensor([0.0, 1.3, -0.4], dtype=torch.float64)
every_form = pytest.mark.parametrize("form", FORMS)
both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def answer_of(form: str, inputs_BTI: Tensor, grads_BTO: Tensor, points: int) -> ParameterGradients:
    """sum_t g_t a_t^T in a form; the positions are those of `points` points side by side.

    Of tokens all are the same, so that every position meets every other.
    """
    width, out = inputs_BTI.shape[2], grads_BTO.shape[2]
    halves = zip(inputs_BTI.chunk(points, 1), grads_BTO.chunk(points, 1), strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseLayout, "cheaper_by_gram", lambda *_: form == "conv by gram")
        patch.setattr(OuterProducts, "ghost_norm_is_cheaper", form == "outer")
        patch.setattr(CirculantGradients, "ghost_norm_is_cheaper", form == "circulant")
        if "conv" in form:
            uses = [LayerCall(1.0, (as_image(a),), as_image(g), {}) for a, g in halves]
            found = conv2d(nn.Conv2d(width, out, 1), uses, WEIGHT)
        elif "circulant" in form:
            uses = [LayerCall(1.0, (a,), g, {}) for a, g in halves]
            found = circulant(CirculantLinear(width, out, block=math.gcd(width, out)), uses, WEIGHT)
        elif form == "tokens":
            uses = [
                LayerCall(1.0, (torch.zeros_like(g[:, :, 0]).long(),), g, {}) for _, g in halves
            ]
            found = embedding(nn.Embedding(3, out), uses, WEIGHT)
        else:
            found = linear(
                nn.Linear(width, out), [LayerCall(1.0, (a,), g, {}) for a, g in halves], WEIGHT
            )
    assert isinstance(found["weight"], FORMS[form])
    return found["weight"]


def as_image(leaf_BTX: Tensor) -> Tensor:
    """Positions as the rows of an image, shape (B, X, T, 1)."""
    return leaf_BTX.transpose(1, 2)[:, :, :, None]


def largest(answer: ParameterGradients, clip: Flat | Automatic) -> float:
    """The largest clipped contribution of one example, in units of the clip norm."""
    squares_B = answer.squares().double()
    factor_B = clip.factors({"w": squares_B})["w"]
    alone_BB = torch.diag(factor_B)
    norms = [answer.sum_scaled(factor_B).double().norm().item() for factor_B in alone_BB]
    return max(norms) / clip.clip_norm


def cancelling(size: float, left: float, dtype: torch.dtype, length: int = 2) -> tuple[Tensor, ...]:
    """Examples whose positions cancel in pairs, down to a share `left` of their size."""
    inputs = draw(NUM, length // 2, 6, seed=1)
    grads = size * draw(NUM, length // 2, 3, seed=2)
    other = -grads + left * size * draw(NUM, length // 2, 3, seed=3)
    return torch.cat([inputs, inputs], 1).to(dtype), torch.cat([grads, other], 1).to(dtype)


@pairs(
    form=FORMS.keys(),
    length=[2, 6, 32],
    clip={"flat": Flat(C), "automatic": Automatic(C)},
    left=[0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3],
)
def test_positions_that_cancel_do_not_pass_the_clip_norm(form, length, clip, left):
    inputs, grads = cancelling(1e4, left, torch.float32, length)
    answer = answer_of(form, inputs, grads, points=1)
    assert largest(answer, clip) <= 1 + 1e-3
    assert largest(answer_of(form, *cancelling(1e4, 1.0, torch.float32), points=1), clip) > 0.99


@pairs(form=FORMS.keys(), size=[1.0, 1e4], apart=[0.0, 1e-8, 1e-6, 1e-4, 1e-2])
def test_points_of_large_weights_do_not_pass_the_clip_norm(form, size, apart):
    inputs, grads = draw(NUM, 6, 6, seed=1), size * draw(NUM, 6, 3, seed=2)
    near = grads + apart * size * draw(NUM, 6, 3, seed=3)
    pair = torch.cat([100 * grads, -99 * near], 1).float()
    answer = answer_of(form, torch.cat([inputs, inputs], 1).float(), pair, points=2)
    assert largest(answer, Flat(C)) <= 1 + 1e-3


@every_form
def test_example_whose_points_cancel_does_not_blur_the_others(form):
    inputs, grads = draw(3, 6, 6, seed=1), draw(3, 6, 3, seed=2)
    grads[2] *= 1e4
    for apart in (0.0, 1e-6, 1e-4, 1e-2):
        last = grads[2:] * (1 + apart * draw(1, 6, 3, seed=3))  # after what it may blur
        near = torch.cat([0 * grads[:2], last])
        pair = torch.cat([100 * grads, -100 * near], 1).float()
        answer = answer_of(form, torch.cat([inputs, inputs], 1).float(), pair, points=2)
        factor_B = Flat(C).factors({"w": answer.squares().double()})["w"]
        one_by_one = [answer.sum_scaled(factor_b).double() for factor_b in torch.diag(factor_B)]
        blur = answer.sum_scaled(factor_B).double() - torch.stack(one_by_one).sum(0)
        assert blur.norm() <= 1e-3 * C, apart


@every_form
def test_positions_that_cancel_in_double_precision_do_not_pass_the_clip_norm(form):
    for left in (0.0, 1e-16, 1e-14, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-4):
        answer = answer_of(form, *cancelling(1e10, left, torch.float64), points=1)
        assert largest(answer, Flat(C)) <= 1 + 1e-3, left


def test_many_positions_that_round_alike_do_not_pass_the_clip_norm():
    length, width = 128, 920  # as wide as it must be to be kept as Gram matrices
    for step in (1.14, 1.23, 1.43, 1.63, 1.83, 1.93):
        grads = torch.full((1, length + 1, width), step)
        left = 30 * torch.finfo(torch.float32).eps * 2 * length * step
        grads[:, -1] = left - grads[:, :-1].double().sum(1).float()
        answer = OuterProducts(torch.ones(1, length + 1, width), grads)
        assert answer.ghost_norm_is_cheaper
        assert largest(answer, Flat(1e-6)) <= 1 + 1e-3, step


@both_precisions
@every_form
def test_slack_is_not_seen_where_nothing_cancels(form, dtype):
    inputs, grads = draw(NUM, 6, 6, seed=1).to(dtype), draw(NUM, 6, 3, seed=2).to(dtype)
    answer = answer_of(form, inputs, grads, points=1)
    squares_B = WrittenOut(answer.each().double()).squares()
    near = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(answer.squares().double(), squares_B, rtol=near, atol=0)


def test_squares_from_grams_are_positive_and_as_large_as_what_rounding_leaves():
    left = compute_gram(torch.ones(1, 2, 1))
    right = compute_gram(torch.tensor([[[1e4], [-1e4]]]))
    (square,) = square_norms_from_grams(left, right, torch.float32)[0].tolist()
    assert math.sqrt(square) >= 16 * 2**-23 * 2e4
    assert math.sqrt(square) <= 17 * 2**-23 * 2e4
    exact = square_norms_from_grams(left, right, torch.float64)[0].item()
    assert 2**-53 * 2e4**2 <= exact <= 1e-5  # what the sum of squares itself may lose


def test_gram_matrices_are_summed_in_double_precision():
    leaf = torch.tensor([[[1e4, 1.0], [1e4, -1.0]]])
    assert compute_gram(leaf).tolist() == [[[1e8 + 1, 1e8 - 1], [1e8 - 1, 1e8 + 1]]]


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)], ids=str)
def test_written_out_answer_may_have_any_shape(shape):
    leaf_B = draw(3, *shape)
    check(WrittenOut(leaf_B), leaf_B)


@pytest.mark.parametrize("num", [1, 63, 64, 65, 4000])
def test_square_of_one_position_is_never_too_small_and_hardly_too_large(num):
    loudness = 10.0 ** torch.linspace(-30, 17, 60)[:, None]
    leaf = (draw(60, num) * loudness).float()
    exact = leaf.double().square().sum(1)
    found = square_norms(leaf)
    lost = 2 * num * torch.finfo(torch.float32).tiny
    assert (found >= exact).all()
    assert (found <= 1.00001 * exact + lost).all()
    assert torch.equal(square_norms(leaf.double()), exact)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_square_of_what_is_not_finite_is_not(bad):
    leaf = torch.ones(2, 70)
    leaf[1, 66] = bad
    assert square_norms(leaf).isfinite().tolist() == [True, False]


def test_answer_of_one_position_needs_no_gram():
    outer = OuterProducts(draw(3, 1, 4, seed=1), draw(3, 1, 5, seed=2))
    check(outer, outer.grads_BTO.transpose(1, 2) @ outer.inputs_BTI)


def test_rows_of_a_table_gather_all_their_positions():
    rows = torch.tensor([[0, 2, 2], [1, 1, 1], [3, 0, 2]])
    grads = draw(3, 3, 2)
    table = torch.zeros(3, 4, 2, dtype=torch.float64)
    for b in range(3):
        for t in range(3):
            table[b, rows[b, t]] += grads[b, t]
    check(EmbeddingRows(rows, grads, 4), table)


def test_answers_of_layers_that_share_a_parameter_add_up():
    rows = torch.randint(0, 5, (3, 6), generator=generator())
    tokens, outer = (
        EmbeddingRows(rows, draw(3, 6, 4), 5),
        OuterProducts(draw(3, 2, 4), draw(3, 2, 5)),
    )
    check(add_shared([tokens, outer]), tokens.each() + outer.each())
    check(add_shared([outer, outer]), 2 * outer.each())
    assert add_shared([outer]) is outer


@pytest.mark.parametrize("num", [1, 3])
def test_tied_table_and_layer_are_one_gradient_that_is_not_written_out(num):
    rows = torch.randint(0, 5, (3, 6), generator=generator())
    parts = EmbeddingRows(rows, draw(3, 6, 4), 5), OuterProducts(draw(3, num, 4), draw(3, num, 5))
    tied = add_shared(parts)
    assert isinstance(tied, TiedRows)
    expected = parts[0].each() + parts[1].each()
    check(tied, expected)
    single = TiedRows(
        EmbeddingRows(rows, parts[0].grads_BTE.float(), 5),
        OuterProducts(parts[1].inputs_BTI.float(), parts[1].grads_BTO.float()),
    )
    check(single, expected.float())


def test_tied_parts_that_cancel_blur_no_other_example_and_have_no_norm_too_small():
    def tied(size, dtype):
        rows = torch.zeros(200, 2, dtype=torch.long)
        table, inputs, grads = torch.ones(200, 2, 8), torch.ones(200, 1, 8), torch.zeros(200, 1, 5)
        grads[:, :, 1] = 1
        table[100], inputs[100], grads[100, :, 0] = size, size, -2
        grads[100, :, 1] = 0
        parts = (table, inputs, grads)
        table, inputs, grads = (x.to(dtype) for x in parts)
        return TiedRows(EmbeddingRows(rows, table, 5), OuterProducts(inputs, grads))

    for size in (1e2, 1e4, 1e6):
        ours, exact = tied(size, torch.float32), tied(size, torch.float64)
        true_B = squared_norms(exact.each())
        assert (ours.squares().double() >= true_B).all()
        factors, _ = compute_factors({"w": ours.squares().double()}, Flat(1.0))
        moved = ours.sum_scaled(factors["w"]).double() - exact.sum_scaled(factors["w"])
        assert moved.norm() <= 2e-4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_form
def test_example_of_factor_zero_leaves_no_trace(form, bad):
    inputs, grads = draw(3, 4, 2, seed=1), draw(3, 4, 6, seed=2)
    expected = answer_of(form, inputs, grads, 1).sum_scaled(FACTORS)
    inputs[0, 1, 1] = grads[0, 2, 3] = bad
    answer = answer_of(form, inputs, grads, 1)
    assert not answer.squares()[0].isfinite()
    torch.testing.assert_close(answer.sum_scaled(FACTORS), expected, rtol=1e-12, atol=1e-12)


@every_form
def test_answer_too_large_for_its_square_is_not_heard(form):
    inputs, grads = draw(3, 4, 2, seed=1).float(), draw(3, 4, 6, seed=2).float()
    inputs[0] *= 1e25
    grads[0] *= 1e25
    answer = answer_of(form, inputs, grads, 1)
    squares = {"w": answer.squares().double()}
    factor_B = torch.where(squares["w"].isfinite(), Flat(C).factors(squares)["w"], 0)
    factor_B[1:] = 0
    assert answer.sum_scaled(factor_B).norm() <= C * (1 + 1e-3)
