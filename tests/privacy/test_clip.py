"""However wild one example's answer, the clipped sum moves by at most the clip norm."""

import math

import pytest
import torch

from dpsweep.core.types import Clipped, PerExample
from dpsweep.privacy.clip import CLIPPINGS, Automatic, Flat, clipped_sum

C = 0.7
every_style = pytest.mark.parametrize("style", CLIPPINGS.values(), ids=CLIPPINGS)
both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def answers(dtype: torch.dtype, num: int = 9) -> PerExample:
    """Ordinary answers of `num` examples, some shorter than C, most longer."""
    rng = torch.Generator().manual_seed(3)
    size_B = torch.logspace(-2, 1, num, dtype=torch.float64)
    shapes = {"w": (num, 4, 3), "b": (num, 3), "scale": (num, 1)}
    return PerExample(
        {
            k: (
                torch.randn(shape, generator=rng, dtype=torch.float64)
                * size_B.view(-1, *(1,) * (len(shape) - 1))
            ).to(dtype)
            for k, shape in shapes.items()
        }
    )


def wild(dtype: torch.dtype) -> PerExample:
    """Ordinary answers among which one is zero and others huge or not numbers at all."""
    tree = answers(dtype, num=12)
    largest = torch.finfo(dtype).max
    for leaf in tree.values():
        leaf[1] = 0.0
        leaf[2] *= 1e15
        leaf[3] = largest  # its norm overflows
        leaf[4] = torch.finfo(dtype).tiny
    tree["w"][5, 0, 0] = math.nan
    tree["b"][6, 1] = math.inf
    tree["scale"][7] = -math.inf
    for leaf in tree.values():
        leaf[8] = math.nan
    tree["w"][9, 0, 0] = math.inf
    tree["w"][9, 0, 1] = -math.inf
    return tree


def flat(tree: Clipped) -> torch.Tensor:
    return torch.cat([x.flatten() for x in tree.values()]).double()


def without(tree: PerExample, i: int) -> PerExample:
    return PerExample({k: torch.cat([g[:i], g[i + 1 :]]) for k, g in tree.items()})


def only(tree: PerExample, i: int) -> PerExample:
    return PerExample({k: g[i : i + 1] for k, g in tree.items()})


@both_precisions
@every_style
@pytest.mark.parametrize("make", [answers, wild])
def test_removing_any_example_moves_the_sum_by_at_most_the_clip_norm(make, style, dtype):
    tree = make(dtype)
    whole = flat(clipped_sum(tree, style(C)))
    assert whole.isfinite().all()
    rounding = len(tree["b"]) * C * torch.finfo(dtype).eps * 8
    for i in range(len(tree["b"])):
        moved = (whole - flat(clipped_sum(without(tree, i), style(C)))).norm().item()
        assert moved <= C + rounding
        assert flat(clipped_sum(only(tree, i), style(C))).norm().item() <= C + rounding


@both_precisions
@every_style
@pytest.mark.parametrize("i", [3, 5, 6, 7, 8, 9])
def test_answers_that_are_not_finite_or_overflow_count_as_zero(i, style, dtype):
    tree = wild(dtype)
    assert (flat(clipped_sum(only(tree, i), style(C))) == 0).all()
    torch.testing.assert_close(
        flat(clipped_sum(tree, style(C))), flat(clipped_sum(without(tree, i), style(C)))
    )


@every_style
def test_answer_of_zeros_adds_zero(style):
    assert (flat(clipped_sum(only(wild(torch.float64), 1), style(C))) == 0).all()


def test_huge_answer_keeps_its_direction_at_the_clip_norm():
    tree = only(wild(torch.float64), 2)
    direction = torch.cat([g.flatten() for g in tree.values()])
    torch.testing.assert_close(
        flat(clipped_sum(tree, Flat(C))), C * direction / direction.norm(), rtol=1e-12, atol=0
    )


def test_flat_leaves_answers_inside_the_ball_untouched_bit_for_bit():
    tree = only(answers(torch.float64), 0)
    assert torch.cat([g.flatten() for g in tree.values()]).norm() < C
    total = clipped_sum(tree, Flat(C))
    assert all(torch.equal(total[k], tree[k][0]) for k in tree)


@every_style
def test_sum_is_the_formula_over_all_tensors_together(style):
    tree, clip = answers(torch.float64), style(C)
    expected = torch.zeros(16, dtype=torch.float64)
    for i in range(9):
        u = torch.cat([g[i].flatten() for g in tree.values()])
        expected += u * (min(1, C / u.norm()) if style is Flat else C / (u.norm() + 0.01))
    torch.testing.assert_close(flat(clipped_sum(tree, clip)), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm", [0.0, 1e-12, 0.01, 1.0, 1e12])
def test_automatic_scales_by_the_printed_factor(norm):
    (factor,) = Automatic(C).factor(torch.tensor([norm], dtype=torch.float64)).tolist()
    assert factor == pytest.approx(C / (norm + 0.01), rel=1e-12)


@every_style
def test_no_examples_sum_to_zeros_of_the_parameters_shapes(style):
    empty = PerExample({k: g[:0] for k, g in answers(torch.float32).items()})
    total = clipped_sum(empty, style(C))
    assert {k: tuple(x.shape) for k, x in total.items()} == {"w": (4, 3), "b": (3,), "scale": (1,)}
    assert (flat(total) == 0).all()


@every_style
def test_parameter_without_dimensions_is_clipped_with_the_rest(style):
    tree = answers(torch.float64)
    expected = flat(clipped_sum(tree, style(C)))
    total = clipped_sum(PerExample({**tree, "scale": tree["scale"].squeeze(1)}), style(C))
    assert total["scale"].shape == ()
    torch.testing.assert_close(flat(total), expected, rtol=1e-12, atol=0)


@every_style
def test_answers_are_left_as_they_were(style):
    tree = wild(torch.float64)
    before = {k: g.clone() for k, g in tree.items()}
    clipped_sum(tree, style(C))
    for k, g in tree.items():
        torch.testing.assert_close(g, before[k], rtol=0, atol=0, equal_nan=True)
