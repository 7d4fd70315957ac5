"""Shelf turns real frequencies down, each bin of the transform together with its mirror."""

import math

import pytest
import torch

from dpsweep.core.types import Released
from dpsweep.filters.base import Public
from dpsweep.filters.spectral import Shelf

NOWHERE = Public(step=0, params={}, noise_std=0.0)
SHELVES = [Shelf(0.5, 0.5), Shelf(0.3, 0.9), Shelf(0.05, 0.65), Shelf(0.95, 0.2), Shelf(0.5, 0.0)]
every_shelf = pytest.mark.parametrize("shelf", SHELVES, ids=repr)


def gradient(num_params: int, seed: int = 0) -> Released:
    """White noise over three tensors with `num_params` coordinates together, at least 8."""
    rng = torch.Generator().manual_seed(seed)
    shapes = {"w": (2, 3), "b": (), "rest": (num_params - 7,)}
    return Released(
        {k: torch.randn(s, generator=rng, dtype=torch.float64) for k, s in shapes.items()}
    )


def flat(tree: Released) -> torch.Tensor:
    return torch.cat([g.flatten() for g in tree.values()])


def shelved(shelf: Shelf, grad: Released) -> Released:
    out, _ = shelf.apply(grad, shelf.init({}), NOWHERE)
    return out


def by_definition(shelf: Shelf, r_P: torch.Tensor) -> torch.Tensor:
    """The same by the transform's defining sum; bins k and P - k share a weight; shape (P,)."""
    num_params = len(r_P)
    n = torch.arange(num_params, dtype=torch.float64)
    waves = torch.exp(-2j * math.pi * n[:, None] * n[None, :] / num_params)
    first_cut = math.floor(shelf.cut * (num_params // 2 + 1))
    frequency = torch.minimum(n, num_params - n)  # of bin k, in cycles per P coordinates
    phi = torch.full((num_params,), 1 - shelf.depth, dtype=torch.complex128)
    phi[frequency < first_cut] = 1.0
    back = waves.conj() @ (phi * (waves @ r_P.to(torch.complex128))) / num_params
    assert back.imag.abs().max() < 1e-12  # mirrored weights keep a real vector real
    return back.real


def as_printed(shelf: Shelf, r_P: torch.Tensor) -> torch.Tensor:
    """The paper's mask, over bins 0..P-1 of the full transform, and the real part; shape (P,)."""
    phi = torch.ones(len(r_P), dtype=torch.float64)
    phi[math.floor(shelf.cut * len(r_P)) :] = 1 - shelf.depth
    return torch.fft.ifft(phi * torch.fft.fft(r_P)).real


@every_shelf
@pytest.mark.parametrize("num_params", [8, 9, 10, 63, 64, 101])
def test_result_is_that_of_the_defining_sum(num_params, shelf):
    grad = gradient(num_params)
    out = shelved(shelf, grad)
    assert {k: x.shape for k, x in out.items()} == {k: g.shape for k, g in grad.items()}
    torch.testing.assert_close(flat(out), by_definition(shelf, flat(grad)), rtol=0, atol=1e-12)


@every_shelf
@pytest.mark.parametrize("num_params", [64, 65])
def test_measured_response_matches_formula(num_params, shelf):
    impulse = Released({k: torch.zeros_like(g) for k, g in gradient(num_params).items()})
    impulse["w"][0, 0] = 1.0
    measured = torch.fft.rfft(flat(shelved(shelf, impulse)))
    expected = shelf.frequency_response(num_params).to(torch.complex128)
    assert len(expected) == num_params // 2 + 1
    torch.testing.assert_close(measured, expected, rtol=0, atol=1e-6)


@every_shelf
@pytest.mark.parametrize("num_params", [20_000, 20_001])
def test_white_noise_power_shrinks_by_noise_gain(num_params, shelf):
    out = flat(shelved(shelf, gradient(num_params)))
    phi = shelf.frequency_response(num_params).double()
    # The mean square of P filtered draws has a relative standard deviation of
    # sqrt(2 mean(phi^4) / P) / mean(phi^2), about 1 to 3 %; five of them are passed by chance
    # once in two million times. One bin in P/2 more or less is 0.01 % of the power.
    deviation = (2 * phi.pow(4).mean() / num_params).sqrt().item() / phi.square().mean().item()
    assert out.square().mean().item() == pytest.approx(shelf.noise_gain, rel=5 * deviation)
    assert phi.square().mean().item() == pytest.approx(shelf.noise_gain, abs=2 / num_params)


@every_shelf
def test_constant_gradient_passes_unchanged(shelf):
    constant = Released({k: torch.full_like(g, 3.0) for k, g in gradient(100).items()})
    out = shelved(shelf, constant)
    for k in constant:
        torch.testing.assert_close(out[k], constant[k], rtol=0, atol=1e-6)


def test_no_depth_is_no_filter():
    grad = gradient(101)
    torch.testing.assert_close(flat(shelved(Shelf(0.5, 0.0), grad)), flat(grad), rtol=0, atol=1e-14)


@pytest.mark.parametrize("num_params", [64, 65])
def test_printed_mask_at_half_is_a_mere_scaling_and_ours_is_not(num_params):
    shelf = Shelf(cut=0.5, depth=0.6)
    impulse = torch.zeros(num_params, dtype=torch.float64)
    impulse[0] = 1.0
    printed = torch.fft.rfft(as_printed(shelf, impulse)).abs()
    # All but the two bins at the ends, which have no mirror or share its side of the cut.
    torch.testing.assert_close(
        printed[1:-1], torch.full_like(printed[1:-1], 1 - shelf.depth / 2), rtol=0, atol=1e-12
    )
    ours = shelf.frequency_response(num_params)
    half = num_params // 4
    assert (ours[:half] == 1).all()
    torch.testing.assert_close(ours[half + 1 :], torch.full_like(ours[half + 1 :], 0.4))


@pytest.mark.parametrize("cut", [0.0, 1.0, -0.2, 1.5, float("nan"), float("inf")])
def test_cut_outside_the_open_unit_interval_is_refused(cut):
    with pytest.raises(ValueError, match=r"Shelf\.cut must lie in \(0, 1\), got"):
        Shelf(cut=cut, depth=0.5)


@pytest.mark.parametrize("depth", [1.0, -0.1, 2.0, float("nan"), float("-inf")])
def test_depth_outside_its_interval_is_refused(depth):
    with pytest.raises(ValueError, match=r"Shelf\.depth must lie in \[0, 1\), got"):
        Shelf(cut=0.5, depth=depth)
