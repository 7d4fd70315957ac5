"""Shelf turns real frequencies down, each bin of the transform together with its mirror."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate

from dpsweep.core.types import Released
from dpsweep.filters.base import Public
from dpsweep.filters.spectral import Shelf

NOWHERE = Public(step=0, params={}, noise_std=0.0)
SHELVES = [Shelf(0.5, 0.5), Shelf(0.3, 0.9), Shelf(0.05, 0.65), Shelf(0.95, 0.2), Shelf(0.5, 0.0)]
SHAPED = [
    Shelf(0.5, 0.5, "exponential"),
    Shelf(0.3, 0.9, "exponential", sharpness=0.5),
    Shelf(0.05, 0.65, "exponential", sharpness=40.0),
    Shelf(0.5, 0.5, "butterworth"),
    Shelf(0.3, 0.9, "butterworth", sharpness=0.5),
    Shelf(0.05, 0.65, "butterworth", sharpness=40.0),
]
every_shape = pytest.mark.parametrize("shelf", [*SHELVES, *SHAPED], ids=repr)
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


def mask(shelf: Shelf, f: np.ndarray) -> np.ndarray:
    """Phi at shares of the spectrum `f`, by its shape's formula; of step, without the bins."""
    if shelf.shape == "step":
        return np.where(f < shelf.cut, 1.0, 1 - shelf.depth)
    if shelf.shape == "exponential":
        notch = 1 - shelf.depth * np.exp(-shelf.sharpness * np.maximum(f - shelf.cut, 0))
        return np.where(f < shelf.cut, 1.0, notch)
    roll_off = 1 / np.sqrt(1 + np.power(f / shelf.cut, 2 * shelf.sharpness))
    return (1 - shelf.depth) + shelf.depth * roll_off


def masked(shelf: Shelf, r_P: np.ndarray) -> np.ndarray:
    """The same by numpy's full complex transform, each bin weighted with its mirror; (P,)."""
    num_params = len(r_P)
    bins = num_params // 2 + 1
    k = np.arange(num_params)
    k = np.minimum(k, num_params - k)
    phi = mask(shelf, k / bins)
    if shelf.shape == "step":
        first = math.floor(shelf.cut * bins)
        phi = np.where(
            k < (max(first, 1) if shelf.scope == "tensor" else first), 1, 1 - shelf.depth
        )
    return np.fft.ifft(phi * np.fft.fft(r_P)).real


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


@every_shape
@pytest.mark.parametrize("num_params", [8, 9, 64, 101, 1000])
def test_each_shape_is_its_formula_over_the_whole_model(num_params, shelf):
    grad = gradient(num_params)
    expected = torch.from_numpy(masked(shelf, flat(grad).numpy()))
    torch.testing.assert_close(flat(shelved(shelf, grad)), expected, rtol=0, atol=1e-12)


@every_shape
@pytest.mark.parametrize("num_params", [9, 64, 1001])
def test_each_tensor_is_masked_by_itself_where_the_scope_says_so(num_params, shelf):
    alone, grad = replace(shelf, scope="tensor"), gradient(num_params)
    out = shelved(alone, grad)
    assert {k: x.shape for k, x in out.items()} == {k: g.shape for k, g in grad.items()}
    for k, g in grad.items():
        expected = torch.from_numpy(masked(alone, g.flatten().numpy()))
        torch.testing.assert_close(out[k].flatten(), expected, rtol=0, atol=1e-12)


@every_shape
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_scopes_of_a_single_tensor_are_one(scope, shelf):
    grad = Released({"w": gradient(407)["rest"]})
    whole, own = (shelved(replace(shelf, scope=s), grad)["w"] for s in ("model", scope))
    assert torch.equal(whole, own)


@every_shape
def test_tensors_of_a_few_elements_keep_their_mean_where_each_is_masked_by_itself(shelf):
    constant = Released({"w": torch.full((2, 2), 3.0), "b": torch.tensor(2.0), "v": torch.ones(3)})
    out = shelved(replace(shelf, scope="tensor"), constant)
    for k in constant:
        torch.testing.assert_close(out[k], constant[k], rtol=1e-6, atol=0)


@pytest.mark.parametrize("shelf", SHAPED, ids=repr)
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_noise_gain_of_each_shape_is_the_mean_of_its_mask_squared(scope, shelf):
    below, _ = integrate.quad(lambda f: mask(shelf, np.array(f)) ** 2, 0, shelf.cut, epsabs=1e-9)
    above, _ = integrate.quad(lambda f: mask(shelf, np.array(f)) ** 2, shelf.cut, 1, epsabs=1e-9)
    assert replace(shelf, scope=scope).noise_gain == pytest.approx(below + above, abs=2e-6)


@pytest.mark.parametrize("shelf", SHAPED, ids=repr)
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_white_noise_power_shrinks_by_noise_gain_of_each_shape(scope, shelf):
    num_params = 20_000
    out = flat(shelved(replace(shelf, scope=scope), gradient(num_params)))
    phi = shelf.frequency_response(num_params)
    # As above: five standard deviations, one false alarm in two million.
    deviation = (2 * phi.pow(4).mean() / num_params).sqrt().item() / phi.square().mean().item()
    assert out.square().mean().item() == pytest.approx(shelf.noise_gain, rel=5 * deviation)


def test_butterworth_is_half_down_at_the_cut_in_power_and_a_step_where_sharp():
    smooth = Shelf(0.5, 0.999, "butterworth", sharpness=3.0).frequency_response(1998)
    assert smooth[500].item() ** 2 == pytest.approx(0.5, abs=2e-3)
    sharp = Shelf(0.5, 0.6, "butterworth", sharpness=1e4).frequency_response(1998)
    step = Shelf(0.5, 0.6).frequency_response(1998)
    away = torch.arange(1000).sub(500).abs() > 5
    torch.testing.assert_close(sharp[away], step[away], rtol=0, atol=1e-6)


def test_exponential_is_a_notch_at_the_cut():
    phi = Shelf(0.25, 0.8, "exponential", sharpness=8.0).frequency_response(1998)
    assert (phi[:250] == 1).all()
    assert phi[250].item() == pytest.approx(0.2)
    assert (phi[250:].diff() > 0).all()
    assert phi[-1].item() > 0.99


@pytest.mark.parametrize("shape", ["step", "exponential", "butterworth"])
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_no_depth_is_no_filter_in_any_shape(scope, shape):
    grad = gradient(101)
    out = shelved(Shelf(0.3, 0.0, shape, scope, 1e6), grad)
    torch.testing.assert_close(flat(out), flat(grad), rtol=0, atol=1e-14)


@pytest.mark.parametrize("cut", [0.0, 1.0, -0.2, 1.5, float("nan"), float("inf")])
def test_cut_outside_the_open_unit_interval_is_refused(cut):
    with pytest.raises(ValueError, match=r"Shelf\.cut must lie in \(0, 1\), got"):
        Shelf(cut=cut, depth=0.5)


@pytest.mark.parametrize("depth", [1.0, -0.1, 2.0, float("nan"), float("-inf")])
def test_depth_outside_its_interval_is_refused(depth):
    with pytest.raises(ValueError, match=r"Shelf\.depth must lie in \[0, 1\), got"):
        Shelf(cut=0.5, depth=depth)


@pytest.mark.parametrize("sharpness", [0.0, -1.0, float("nan"), float("inf")])
def test_sharpness_that_is_not_positive_and_finite_is_refused(sharpness):
    with pytest.raises(ValueError, match=r"Shelf\.sharpness must be a finite number above 0, got"):
        Shelf(0.5, 0.5, "butterworth", sharpness=sharpness)


@pytest.mark.parametrize(
    ("key", "known"), [("shape", "butterworth, exp"), ("scope", "model, tensor")]
)
def test_unknown_shape_or_scope_is_refused_with_the_known_ones(key, known):
    with pytest.raises(
        ValueError, match=rf"Shelf\.{key}: unknown {key} 'smooth'\..* Known: {known}"
    ):
        Shelf(0.5, 0.5, **{key: "smooth"})
