"""However wild one example's answer, the clipped sum moves by at most the clip norm."""

import math

import pytest
import torch
from scipy import stats

from dpsweep.core.types import Clipped, PerExample, Released, Tensors
from dpsweep.privacy.clip import (
    INSIDE,
    Automatic,
    Clip,
    Flat,
    PerLayer,
    Quantile,
    add_clipped,
    clipped_sum,
    compute_factors,
    layer_of,
    split_count,
    weighted_sum,
)

C = 0.7
SHARE = 0.3
LAYERS = {"conv": ("conv.w", "conv.b"), "norm": ("norm.scale",)}
STYLES = {
    "flat": Flat,
    "automatic": Automatic,
    "per_layer": PerLayer,
    "per_layer_given": lambda c: PerLayer(c, {"conv": 0.6, "norm": 0.8}),
    "adaptive": lambda c: Quantile(math.sqrt(1 - SHARE) * c, SHARE, quantile=0.5, rate=0.2),
}
every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def answers(dtype: torch.dtype, num: int = 9) -> PerExample:
    """Ordinary answers of `num` examples, some shorter than C, most longer."""
    rng = torch.Generator().manual_seed(3)
    size_B = torch.logspace(-2, 1, num, dtype=torch.float64)
    shapes = {"conv.w": (num, 4, 3), "conv.b": (num, 3), "norm.scale": (num, 1)}
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
    tree["conv.w"][5, 0, 0] = math.nan
    tree["conv.b"][6, 1] = math.inf
    tree["norm.scale"][7] = -math.inf
    for leaf in tree.values():
        leaf[8] = math.nan
    tree["conv.w"][9, 0, 0] = math.inf
    tree["conv.w"][9, 0, 1] = -math.inf
    return tree


def flat(tree: Tensors) -> torch.Tensor:
    """All that is released, the coordinate that counts included."""
    return torch.cat([x.flatten() for x in tree.values()]).double()


def gradient(tree: Clipped) -> torch.Tensor:
    """The answers themselves, without the count."""
    return flat({k: x for k, x in tree.items() if k != INSIDE})


def without(tree: PerExample, i: int) -> PerExample:
    return PerExample({k: torch.cat([g[:i], g[i + 1 :]]) for k, g in tree.items()})


def only(tree: PerExample, i: int) -> PerExample:
    return PerExample({k: g[i : i + 1] for k, g in tree.items()})


def squares(tree: PerExample) -> Tensors:
    return {k: g.flatten(1).square().sum(1) for k, g in tree.items()}


@both_precisions
@every_style
@pytest.mark.parametrize("make", [answers, wild])
def test_removing_any_example_moves_the_sum_by_at_most_the_clip_norm(make, style, dtype):
    tree = make(dtype)
    whole = flat(clipped_sum(tree, style(C)))
    assert whole.isfinite().all()
    rounding = len(tree["conv.b"]) * C * torch.finfo(dtype).eps * 8
    for i in range(len(tree["conv.b"])):
        moved = (whole - flat(clipped_sum(without(tree, i), style(C)))).norm().item()
        assert moved <= C + rounding
        assert flat(clipped_sum(only(tree, i), style(C))).norm().item() <= C + rounding


@every_style
def test_clip_norm_is_the_bound_on_the_whole(style):
    assert style(C).clip_norm == pytest.approx(C, rel=1e-12)


@both_precisions
@every_style
@pytest.mark.parametrize("i", [3, 5, 6, 7, 8, 9])
def test_answers_that_are_not_finite_or_overflow_count_as_zero(i, style, dtype):
    tree = wild(dtype)
    assert (gradient(clipped_sum(only(tree, i), style(C))) == 0).all()
    torch.testing.assert_close(
        gradient(clipped_sum(tree, style(C))), gradient(clipped_sum(without(tree, i), style(C)))
    )


@every_style
def test_answer_of_zeros_adds_zero(style):
    assert (gradient(clipped_sum(only(wild(torch.float64), 1), style(C))) == 0).all()


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


def factor(style: str, norm: float) -> float:
    """What an answer, or its part in a layer, is scaled by, as printed."""
    match style:
        case "automatic":
            return C / (norm + 0.01)
        case "adaptive":
            return min(1, math.sqrt(1 - SHARE) * C / norm)
    return min(1, C / norm)


@pytest.mark.parametrize("style", ["flat", "automatic", "adaptive"])
def test_sum_is_the_formula_over_all_tensors_together(style):
    tree, clip = answers(torch.float64), STYLES[style](C)
    expected = torch.zeros(16, dtype=torch.float64)
    for i in range(9):
        u = torch.cat([g[i].flatten() for g in tree.values()])
        expected += u * factor(style, u.norm().item())
    torch.testing.assert_close(gradient(clipped_sum(tree, clip)), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm", [0.0, 1e-12, 0.01, 1.0, 1e12])
def test_automatic_scales_by_the_printed_factor(norm):
    square = {"w": torch.tensor([norm**2], dtype=torch.float64)}
    assert Automatic(C).factors(square)["w"].item() == pytest.approx(C / (norm + 0.01), rel=1e-12)
    other = Automatic(C, stability=0.5).factors(square)["w"].item()
    assert other == pytest.approx(C / (norm + 0.5), rel=1e-12)


@every_style
def test_no_examples_sum_to_zeros_of_the_parameters_shapes(style):
    empty = PerExample({k: g[:0] for k, g in answers(torch.float32).items()})
    total = clipped_sum(empty, style(C))
    shapes = {k: tuple(x.shape) for k, x in total.items() if k != INSIDE}
    assert shapes == {"conv.w": (4, 3), "conv.b": (3,), "norm.scale": (1,)}
    assert (flat(total) == 0).all()


@every_style
def test_parameter_without_dimensions_is_clipped_with_the_rest(style):
    tree = answers(torch.float64)
    expected = flat(clipped_sum(tree, style(C)))
    scalar = {**tree, "norm.scale": tree["norm.scale"].squeeze(1)}
    total = clipped_sum(PerExample(scalar), style(C))
    assert total["norm.scale"].shape == ()
    torch.testing.assert_close(flat(total), expected, rtol=1e-12, atol=0)


@every_style
def test_answers_are_left_as_they_were(style):
    tree = wild(torch.float64)
    before = {k: g.clone() for k, g in tree.items()}
    clipped_sum(tree, style(C))
    for k, g in tree.items():
        torch.testing.assert_close(g, before[k], rtol=0, atol=0, equal_nan=True)


@every_style
def test_sum_over_two_batches_is_the_sum_of_their_sums(style):
    tree, clip = answers(torch.float64), style(C)
    parts = [PerExample({k: g[part] for k, g in tree.items()}) for part in (slice(4), slice(4, 9))]
    total = add_clipped(*(clipped_sum(part, clip) for part in parts))
    whole = clipped_sum(tree, clip)
    assert list(total) == list(whole)
    torch.testing.assert_close(flat(total), flat(whole), rtol=1e-12, atol=1e-14)


@every_style
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_factors_are_zero_in_every_layer_where_one_square_is_not_finite(bad, style):
    wrong = squares(answers(torch.float64))
    wrong["norm.scale"][2] = bad
    factors, _ = compute_factors(wrong, style(C))
    right, _ = compute_factors(squares(answers(torch.float64)), style(C))
    for k, factor_B in factors.items():
        assert factor_B[2] == 0
        kept = torch.arange(9) != 2
        assert torch.equal(factor_B[kept], right[k][kept])
        assert (factor_B[kept] > 0).all()


@every_style
def test_factors_are_zero_where_finite_squares_add_up_to_infinity(style):
    wrong = squares(answers(torch.float64))
    wrong["conv.w"][2] = wrong["norm.scale"][2] = 1.5e308
    factors, count = compute_factors(wrong, style(C))
    assert all(factor_B[2] == 0 for factor_B in factors.values())
    assert all(x.isfinite() for x in count.values())


def test_leaf_whose_factor_is_zero_may_hold_anything():
    leaf = torch.tensor([[1.0, 2.0], [math.nan, math.inf], [3.0, -1.0]])
    total = weighted_sum(torch.tensor([2.0, 0.0, 1.0]), leaf)
    assert total.tolist() == [5.0, 3.0]


# Layer by layer.


def test_layer_is_the_module_that_owns_a_parameter():
    assert [layer_of(k) for k in ("0.conv.weight", "0.bias", "scale")] == ["0.conv", "0", ""]


@pytest.mark.parametrize(
    "bounds", [None, {"conv": 0.6, "norm": 0.8}, {"norm": 0.28, "conv": 0.96}], ids=repr
)
def test_each_layers_part_is_clipped_to_its_own_bound(bounds):
    tree, clip = answers(torch.float64), PerLayer(C, bounds)
    total = clipped_sum(tree, clip)
    for layer, names in LAYERS.items():
        bound = C * (bounds or dict.fromkeys(LAYERS, math.sqrt(0.5)))[layer]
        expected = sum(
            (u := torch.cat([tree[k][i].flatten() for k in names])) * min(1, bound / u.norm())
            for i in range(9)
        )
        found = torch.cat([total[k].flatten() for k in names])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_part_inside_its_bound_stays_whole_however_large_the_others():
    tree = only(answers(torch.float64), 0)
    tree["norm.scale"] = tree["norm.scale"] * 1e6
    total = clipped_sum(tree, PerLayer(C))
    assert torch.equal(total["conv.w"], tree["conv.w"][0])
    assert abs(total["norm.scale"].item()) == pytest.approx(C / math.sqrt(2), rel=1e-12)


def test_equal_bounds_are_shares_of_the_number_of_layers():
    names = ["0.weight", "0.bias", "2.weight", "5.a.weight", "5.b.weight"]
    shares = PerLayer(C).resolve_bounds(names)
    assert shares == dict.fromkeys(["0", "2", "5.a", "5.b"], 0.5)


def test_bounds_are_given_to_four_digits_and_mended_to_the_last():
    names = ["0.w", "1.w", "2.w"]
    shares = PerLayer(C, {"0": 0.5774, "1": 0.5774, "2": 0.5774}).resolve_bounds(names)
    assert sum(share**2 for share in shares.values()) == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            {"0": 0.6, "3": 0.8},
            r"bounds are given for '0', '3', and the layers of this model are '0', '2'\. Give one",
        ),
        ({"0": 1.0}, r"bounds are given for '0', and the layers of this model are '0', '2'"),
        (
            {"0": 0.5, "2": 0.5},
            r"squares of the bounds sum to 0\.5, and must sum to 1: .*\{0: 0\.7071, 2: 0\.7071\}",
        ),
        ({"0": 0.6, "2": 0.9}, r"sum to 1\.17, .*In the same proportions: \{0: 0\.5547, 2: 0\.8"),
    ],
)
def test_bounds_that_do_not_fit_the_model_are_refused(bounds, message):
    names = ["0.weight", "0.bias", "2.weight"]
    with pytest.raises(ValueError, match=message):
        PerLayer(C, bounds).resolve_bounds(names)
    with pytest.raises(ValueError, match=message):
        PerLayer(C, bounds).factors({k: torch.ones(2) for k in names})


def test_mended_proportions_of_the_message_are_accepted():
    total = 0.6**2 + 0.9**2
    mended = {k: round(v / math.sqrt(total), 4) for k, v in {"0": 0.6, "2": 0.9}.items()}
    assert PerLayer(C, mended).resolve_bounds(["0.w", "2.w"])


# A norm that follows a quantile (Andrew et al. 2021).


def adaptive(share: float = SHARE, bound: float = 0.5, **changes: float) -> Quantile:
    return Quantile(bound, share, **{"quantile": 0.5, "rate": 0.2, **changes})


@pytest.mark.parametrize("share", [1e-9, 0.01, 0.3, 0.99])
def test_long_answer_and_its_count_together_are_exactly_as_long_as_the_clip_norm(share):
    clip, tree = adaptive(share), only(wild(torch.float64), 2)
    assert flat(clipped_sum(tree, clip)).norm().item() == pytest.approx(clip.clip_norm, rel=1e-9)
    assert clip.clip_norm == pytest.approx(0.5 / math.sqrt(1 - share), rel=1e-12)


@every_style
def test_only_the_adaptive_style_counts(style):
    total = clipped_sum(answers(torch.float64), style(C))
    rest, count = split_count(Released(total))
    assert list(rest) == ["conv.w", "conv.b", "norm.scale"]
    assert (count is None) == (INSIDE not in total) == (not isinstance(style(C), Quantile))


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_count_is_half_an_example_up_for_each_inside_and_down_for_each_outside(share):
    tree = answers(torch.float64)
    norms = sum(squares(tree).values()).sqrt()
    bound = norms.sort().values[6].item()  # seven inside, the bound's own among them
    clip = adaptive(share, bound)
    unit = 2 * math.sqrt(share) * clip.clip_norm
    assert clipped_sum(tree, clip)[INSIDE].item() == pytest.approx(unit * (7 / 2 - 2 / 2))


def test_answers_that_are_not_finite_are_counted_as_the_zeros_they_become():
    count = clipped_sum(only(wild(torch.float64), 5), adaptive())[INSIDE].item()
    assert count == pytest.approx(math.sqrt(SHARE) * adaptive().clip_norm)


@pytest.mark.parametrize("quantile", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("noise", [0.0, -1.3, 0.7])
@pytest.mark.parametrize("inside", [0, 3, 9])
def test_bound_moves_as_andrew_et_al_print_it(inside, noise, quantile):
    # b~ = (sum_i b_i + sigma_b z) / m,   C <- C exp(-eta (b~ - gamma)), with sum_i (b_i - 1/2) for
    # sum_i b_i as in their Theorem 1, and b~ kept a share.
    num, batch_size, rate, sigma = 9, 10, 0.3, 0.8
    clip = adaptive(quantile=quantile, rate=rate)
    sigma_b = sigma / (2 * math.sqrt(SHARE))
    b = [1] * inside + [0] * (num - inside)
    share_inside = 0.5 + (sum(x - 0.5 for x in b) + sigma_b * noise) / batch_size
    share_inside = min(max(share_inside, 0), 1)
    expected = clip.bound * math.exp(-rate * (share_inside - quantile))

    lengths = {"w": torch.tensor([0.1 if x else 9.0 for x in b], dtype=torch.float64)}
    _, count = compute_factors(lengths, clip)
    released = (count[INSIDE] + sigma * clip.clip_norm * noise) / batch_size
    assert clip.update_bound(released, batch_size) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("released", [1e9, -1e9])
def test_bound_moves_by_at_most_the_rate_whatever_the_noise(released):
    clip = adaptive(quantile=0.5, rate=0.2)
    factor = clip.update_bound(torch.tensor(released), 10) / clip.bound
    assert abs(math.log(factor)) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize(("sigma", "sigma_b"), [(1.0, 5.0), (4.0, 2.1), (0.3, 100.0)])
def test_papers_two_noises_add_up_to_the_steps_own(sigma, sigma_b):
    share = (sigma / (2 * sigma_b)) ** 2
    clip = adaptive(share)
    sigma_r = sigma * clip.clip_norm / clip.bound  # noise on the gradient, in units of c
    assert 1 / sigma**2 == pytest.approx(1 / sigma_r**2 + 1 / (2 * sigma_b) ** 2, rel=1e-12)
    on_count = sigma * clip.clip_norm / (2 * math.sqrt(share) * clip.clip_norm)
    assert on_count == pytest.approx(sigma_b, rel=1e-12)


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.7])
def test_bound_finds_the_quantile_of_the_norms_under_noise(quantile):
    batch_size, sigma, start, steps = 400, 1.0, 300, 1500
    sigma_b = batch_size / 20
    law, rng = stats.lognorm(s=1.0, scale=2.0), torch.Generator().manual_seed(0)
    clip: Clip = adaptive((sigma / (2 * sigma_b)) ** 2, 0.01, quantile=quantile)
    shares = []
    for t in range(start + steps):
        assert isinstance(clip, Quantile)
        num = int(torch.poisson(torch.tensor(float(batch_size)), generator=rng))
        norms = 2 * torch.randn(num, generator=rng, dtype=torch.float64).exp()
        noise = sigma * clip.clip_norm * torch.randn((), generator=rng, dtype=torch.float64)
        _, count = compute_factors({"w": norms.square()}, clip)
        bound = clip.update_bound((count[INSIDE] + noise) / batch_size, batch_size)
        clip = Quantile(bound, clip.share, clip.quantile, clip.rate)
        if t >= start:
            shares.append(law.cdf(clip.bound))
    # Every step adds -rate (share + error - quantile) to log c, so the mean share is the quantile
    # but for the mean error and (log c at the ends) / (rate steps). An error has the variance of
    # sum (b_i - 1/2) / B, 1 / (4 B), plus (sigma_b / B)^2; five standard deviations of the mean of
    # 1500, and 0.5 for the change of log c, fail by chance once in two million times for each.
    deviation = math.sqrt((1 / (4 * batch_size) + (sigma_b / batch_size) ** 2) / steps)
    tolerance = 5 * deviation + 0.5 / (0.2 * steps)
    assert sum(shares) / steps == pytest.approx(quantile, abs=tolerance)
    assert tolerance < 0.01
