"""The noise that crosses the boundary has the law the accountant was promised."""

import math

import pytest
import torch
from scipy import stats

from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped, Released
from dpsweep.privacy.release import GRID_BITS, release

SHAPES = {"w": (30, 40), "b": (40,), "scale": ()}
SIGMA, C, B = 1.3, 0.7, 50
SECRET = Secret.fixed("release")


def totals(dtype: torch.dtype = torch.float64) -> Clipped:
    rng = torch.Generator().manual_seed(0)
    return Clipped({k: torch.randn(s, generator=rng).to(dtype) for k, s in SHAPES.items()})


def released(total: Clipped, *, step: int = 0, sigma: float = SIGMA, batch: int = B) -> Released:
    rng = SECRET.stream(step, "noise")
    return release(total, clip_norm=C, noise_multiplier=sigma, batch_size=batch, rng=rng)


def noise_in_clipped_space(step: int) -> torch.Tensor:
    """B (r - r without noise) / C, shape (P,): draws of N(0, sigma^2)."""
    total = totals()
    r = released(total, step=step)
    return torch.cat([((B * r[k] - total[k]) / C).flatten() for k in total])


def test_without_noise_the_sum_is_divided_by_the_constant_and_nothing_else():
    total = totals()
    r = released(total, sigma=0.0)
    assert all(torch.equal(r[k], total[k] / B) for k in total)


def test_noise_follows_the_calibrated_normal_law():
    draws = torch.cat([noise_in_clipped_space(t) for t in range(20)])
    # Kolmogorov-Smirnov over 24,820 draws at level 1e-6: one false alarm in a million.
    law = stats.norm(scale=SIGMA).cdf
    assert stats.kstest(draws, law).pvalue > 1e-6
    # The same test refuses the noise of known faults: rescaled after it was added.
    assert stats.kstest(draws * 2 / 3, law).pvalue < 1e-30
    assert stats.kstest(draws * 3 / 2, law).pvalue < 1e-30


@pytest.mark.parametrize("sigma", [0.3, 5.0])
@pytest.mark.parametrize("batch", [1, 1000])
def test_noise_of_the_release_scales_as_sigma_c_over_b(sigma, batch):
    zeros = Clipped({k: torch.zeros_like(x) for k, x in totals().items()})
    unit = released(zeros, sigma=1.0, batch=1)
    scaled = released(zeros, sigma=sigma, batch=batch)
    for k in zeros:
        grid = (
            sigma * C * 2**-GRID_BITS / batch
        )  # releases are rounded to a grid of about this width
        torch.testing.assert_close(scaled[k], unit[k] * sigma / batch, rtol=1e-12, atol=2 * grid)


def test_noise_is_independent_from_step_to_step_and_coordinate_to_coordinate():
    noise_TP = torch.stack([noise_in_clipped_space(t) for t in range(20)]) / SIGMA
    pairs = {
        "next step": (noise_TP[:-1], noise_TP[1:]),
        "ten steps on": (noise_TP[:-10], noise_TP[10:]),
        "next coordinate": (noise_TP[:, :-1], noise_TP[:, 1:]),
        "next row of w": (noise_TP[:, :1160], noise_TP[:, 40:1200]),
        "last row of w and b": (noise_TP[:, 1160:1200], noise_TP[:, 1200:1240]),
    }
    for a, b in pairs.values():
        # The mean of n products of independent standard normals has deviation 1/sqrt(n); five
        # of them are passed by chance once in two million times.
        assert abs((a * b).mean().item()) < 5 / math.sqrt(a.numel())


def test_no_two_coordinates_share_a_draw():
    noise = torch.cat([noise_in_clipped_space(t) for t in range(20)])
    rounded = (noise / SIGMA * 2**GRID_BITS).round()  # totals shift a draw by less than a cell
    # 24,820 draws in cells of 2^-22: about 20 chance pairs are expected, with deviation 4.6.
    assert len(rounded.unique()) > len(rounded) - 60


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_divisor_is_the_given_constant(batch):
    total = totals()
    r = released(total, batch=batch)
    one = released(total, batch=1)
    assert all(torch.equal(r[k], one[k] / batch) for k in total)


def test_the_same_stream_gives_the_same_noise_and_another_step_other_noise():
    total = totals()
    first, again, later = (released(total, step=t) for t in (4, 4, 5))
    assert all(torch.equal(first[k], again[k]) for k in total)
    assert all((first[k] != later[k]).all() for k in total)


def test_float32_and_float64_runs_see_the_same_noise():
    single = released(totals(torch.float32))
    double = released(totals(torch.float64))
    assert all(x.dtype == torch.float32 for x in single.values())
    for k in single:
        torch.testing.assert_close(single[k].double(), double[k], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0])
def test_low_bits_do_not_tell_how_large_the_sum_was(sigma):
    """Releases of a zero sum and of a large one lie on the same grid (Mironov 2012)."""
    grid = 2.0 ** (math.floor(math.log2(sigma * C)) - GRID_BITS)
    for size in (0.0, 1e-7, 1.0, 1000.0):
        total = Clipped({k: x * size for k, x in totals().items()})
        for x in released(total, sigma=sigma, batch=1).values():
            assert torch.equal(torch.round(x / grid) * grid, x)


def test_sum_is_left_as_it_was():
    total, before = totals(), totals()
    released(total)
    assert all(torch.equal(total[k], before[k]) for k in total)
