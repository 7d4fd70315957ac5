"""Filters of first order do to a signal what their two describing numbers say."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import optimize

from dpsweep.core.types import Released
from dpsweep.filters.base import Filter, Gain, Public
from dpsweep.filters.lti import Ema, Momentum, Riccati

GAINS = [0.05, 0.3, 0.7, 1.0]
BETAS = [0.0, 0.5, 0.9]
DRIFTS = [(0.5, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.9), (3.0, 0.5), (0.01, 0.01), (1e6, 0.0)]
every_drift = pytest.mark.parametrize(("process", "hessian"), DRIFTS)


def run(filter_: Filter, signal_T: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Feeds `signal_T`, shape (T, ...), one row per step; same shape back."""
    state, out = filter_.init({}), []
    for t, g in enumerate(signal_T, start=first):
        public = Public(step=t, params={}, noise_std=0.0)
        filtered, state = filter_.apply(Released({"w": g}), state, public)
        out.append(filtered["w"])
    return torch.stack(out)


@pytest.mark.parametrize("gain", GAINS)
def test_constant_gradient_passes_unchanged_from_the_first_step(gain):
    signal = torch.full((20,), 3.0)
    torch.testing.assert_close(run(Ema(gain), signal), signal)


@pytest.mark.parametrize("gain", GAINS)
def test_output_is_the_printed_recursion(gain):
    signal = torch.randn(30, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = [signal[0]]
    for r in signal[1:]:
        expected.append((1 - gain) * expected[-1] + gain * r)
    torch.testing.assert_close(run(Ema(gain), signal), torch.stack(expected), rtol=0, atol=1e-14)


@pytest.mark.parametrize("gain", GAINS)
def test_white_noise_variance_shrinks_by_noise_gain(gain):
    noise = torch.randn(400, 4096, generator=torch.Generator().manual_seed(0))
    settled = run(Ema(gain), noise)[-1]
    # 4096 draws: the sample variance has relative standard deviation sqrt(2/4095) = 2.2%,
    # so 5 of them make a false alarm a one-in-two-million event.
    assert settled.var().item() == pytest.approx(Ema(gain).noise_gain, rel=5 * math.sqrt(2 / 4095))


@pytest.mark.parametrize("gain", GAINS)
def test_measured_response_matches_formula(gain):
    n = 2048
    impulse = torch.zeros(n + 1, dtype=torch.float64)
    impulse[1] = 1.0  # step 0 sets the state to zero
    measured = torch.fft.rfft(run(Ema(gain), impulse)[1:])
    w = torch.linspace(0, math.pi, n // 2 + 1, dtype=torch.float64)
    torch.testing.assert_close(measured, Ema(gain).frequency_response(w), atol=1e-9, rtol=0)


def test_gain_one_is_no_filter():
    noise = torch.randn(10, 7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(Ema(1.0), noise), noise)


@pytest.mark.parametrize("gain", [0.0, -0.1, 1.3, float("nan"), float("inf")])
def test_gain_outside_the_unit_interval_is_refused(gain):
    with pytest.raises(ValueError, match=r"Ema\.gain must lie in \(0, 1\], got"):
        Ema(gain)


@pytest.mark.parametrize("gain", GAINS)
def test_average_has_the_same_gain_at_every_step(gain):
    filter_: Gain = Ema(gain)
    assert [filter_.gain_at(t) for t in (0, 1, 1000)] == [gain] * 3


@pytest.mark.parametrize("beta", BETAS)
def test_momentum_is_the_printed_recursion(beta):
    noise = torch.randn(30, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected, m = [], torch.zeros(4, dtype=torch.float64)
    for r in noise:
        m = beta * m + r
        expected.append(m)
    torch.testing.assert_close(
        run(Momentum(beta), noise), torch.stack(expected), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("beta", BETAS)
def test_momentum_multiplies_white_noise_variance_by_noise_gain(beta):
    noise = torch.randn(200, 4096, generator=torch.Generator().manual_seed(0))
    settled = run(Momentum(beta), noise)[-1]
    # As above: one false alarm in two million. 0.9^200 is 7e-10.
    assert settled.var().item() == pytest.approx(
        Momentum(beta).noise_gain, rel=5 * math.sqrt(2 / 4095)
    )


@pytest.mark.parametrize("beta", BETAS)
def test_measured_response_of_momentum_matches_formula(beta):
    n = 2048
    impulse = torch.zeros(n, dtype=torch.float64)
    impulse[0] = 1.0
    measured = torch.fft.rfft(run(Momentum(beta), impulse))
    w = torch.linspace(0, math.pi, n // 2 + 1, dtype=torch.float64)
    torch.testing.assert_close(measured, Momentum(beta).frequency_response(w), atol=1e-9, rtol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_momentum_adds_a_constant_gradient_up(beta):
    constant = torch.full((400,), 3.0, dtype=torch.float64)
    assert run(Momentum(beta), constant)[-1].item() == pytest.approx(3 / (1 - beta), rel=1e-9)
    zero = torch.zeros(1, dtype=torch.float64)
    assert Momentum(beta).frequency_response(zero).real.item() == pytest.approx(1 / (1 - beta))


def test_momentum_without_beta_is_no_filter():
    noise = torch.randn(10, 7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(Momentum(0.0), noise), noise)


@pytest.mark.parametrize("beta", [1.0, -0.1, 1.5, math.nan, math.inf])
def test_beta_outside_its_interval_is_refused(beta):
    with pytest.raises(ValueError, match=r"Momentum\.beta must lie in \[0, 1\), got"):
        Momentum(beta)


def printed_gains(process: float, hessian: float, steps: int) -> list[float]:
    """k_0..k_{steps-1} as DiSK's appendix A.3 prints the recursion, with sigma_w = 1."""
    sigma_v2, sigma_h2, sigma_w2, p, out = process**2, hessian**2, 1.0, 1.0, []
    for _ in range(steps):
        out.append((p + sigma_v2 + sigma_h2) / (p + sigma_v2 + sigma_w2))
        p = (sigma_w2 - sigma_h2) * (p + sigma_v2 + sigma_h2) / (p + sigma_v2 + sigma_w2)
    return out


@every_drift
def test_riccati_gains_are_those_of_the_printed_recursion(process, hessian):
    filter_: Gain = Riccati(process, hessian)
    ours = [filter_.gain_at(t) for t in range(1500)]
    np.testing.assert_allclose(ours, printed_gains(process, hessian, 1500), rtol=1e-11)


@every_drift
def test_riccati_gain_of_a_step_does_not_depend_on_what_was_asked_before(process, hessian):
    straight = [Riccati(process, hessian).gain_at(t) for t in range(50)]
    backwards = Riccati(process, hessian)
    assert [backwards.gain_at(t) for t in reversed(range(50))] == straight[::-1]


@every_drift
def test_riccati_settles_where_the_recursion_stands_still(process, hessian):
    v, h = process**2, hessian**2
    # p = (1 - h)(p + v + h) / (p + v + 1): its root between 0 and 1, found without the formula.
    root = optimize.brentq(
        lambda p: p * (p + v + 1) - (1 - h) * (p + v + h), 0, 1, xtol=1e-15, rtol=1e-14
    )
    k_inf = (root + v + h) / (root + v + 1)
    filter_ = Riccati(process, hessian)
    assert filter_.settled_gain == pytest.approx(k_inf, rel=1e-9)
    # The slowest has 1 - k_inf = 0.986, and (1 - k_inf)^8000 is 0 within rounding.
    assert filter_.gain_at(4000) == filter_.gain_at(10**9) == filter_.settled_gain


@every_drift
def test_riccati_settles_at_the_rate_of_appendix_a3_mended(process, hessian):
    v, h = process**2, hessian**2
    both = math.sqrt((v + h) * (4 + v - 3 * h))
    # Print has + 3 h in place of - h, which is another number: for h = 0.81 and v = 0.04 it
    # gives 0.585, where the recursion's distance shrinks to 0.025 a step. Without h both agree.
    c_k = (2 + v - h - both) / (2 + v - h + both)
    k_inf = Riccati(process, hessian).settled_gain
    assert (1 - k_inf) ** 2 == pytest.approx(c_k, rel=1e-6, abs=1e-12)


def test_riccati_gain_falls_from_a_half_to_its_limit():
    gains = [Riccati(0.1, 0.2).gain_at(t) for t in range(200)]
    assert all(a >= b for a, b in pairwise(gains))
    assert gains[0] == pytest.approx(1.05 / 2.01)
    assert gains[-1] == pytest.approx(Riccati(0.1, 0.2).settled_gain)


@every_drift
def test_riccati_averages_with_its_gains(process, hessian):
    noise = torch.randn(30, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = [noise[0]]
    for k, r in zip(printed_gains(process, hessian, 30)[1:], noise[1:], strict=True):
        expected.append((1 - k) * expected[-1] + k * r)
    out = run(Riccati(process, hessian), noise)
    torch.testing.assert_close(out, torch.stack(expected), rtol=0, atol=1e-10)


def test_riccati_of_a_known_drift_errs_less_than_any_constant_gain():
    # A random walk of std 0.3 under noise of std 1, 4096 of them, judged at steps 60..99: the
    # settled gain is the best there is. Neighbouring constant gains lose 2 % and more here.
    rng = torch.Generator().manual_seed(4)
    walk = 0.3 * torch.randn(100, 4096, generator=rng).cumsum(0)
    seen = walk + torch.randn(100, 4096, generator=rng)

    def error(filter_: Filter) -> float:
        return (run(filter_, seen) - walk)[60:].square().mean().item()

    best = Riccati(0.3, 0.0)
    assert error(best) < error(Ema(best.settled_gain * 1.3)) * 0.99
    assert error(best) < error(Ema(best.settled_gain / 1.3)) * 0.99


@every_drift
def test_riccati_keeps_a_constant_gradient(process, hessian):
    constant = torch.full((20,), 3.0)
    torch.testing.assert_close(run(Riccati(process, hessian), constant), constant)


@pytest.mark.parametrize(("process", "hessian"), [(0.5, 0.0), (0.2, 0.9), (0.0, 0.3)])
def test_settled_riccati_shrinks_white_noise_by_noise_gain(process, hessian):
    noise = torch.randn(200, 4096, generator=torch.Generator().manual_seed(0))
    settled = run(Riccati(process, hessian), noise)[-1]
    # As above: one false alarm in two million.
    assert settled.var().item() == pytest.approx(
        Riccati(process, hessian).noise_gain, rel=5 * math.sqrt(2 / 4095)
    )


def test_measured_response_of_settled_riccati_matches_formula():
    filter_, n = Riccati(0.3, 0.2), 1024
    impulse = torch.zeros(n + 1, dtype=torch.float64)
    impulse[1] = 1.0  # the first step sets the state to zero
    measured = torch.fft.rfft(run(filter_, impulse, first=1000)[1:])
    w = torch.linspace(0, math.pi, n // 2 + 1, dtype=torch.float64)
    torch.testing.assert_close(measured, filter_.frequency_response(w), atol=1e-9, rtol=0)


@pytest.mark.parametrize("process", [-0.1, math.nan, math.inf, 1e200])
def test_process_outside_its_range_is_refused(process):
    with pytest.raises(
        ValueError, match=r"Riccati\.process must be a finite number, 0 or more, got"
    ):
        Riccati(process, 0.1)


@pytest.mark.parametrize("hessian", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_hessian_outside_its_interval_is_refused(hessian):
    with pytest.raises(ValueError, match=r"Riccati\.hessian must lie in \[0, 1\), got"):
        Riccati(0.1, hessian)


@pytest.mark.parametrize(("process", "hessian"), [(0, 0), (0.0, 0.0), (1e-13, 1e-14)])
def test_riccati_that_would_learn_nothing_is_refused(process, hessian):
    with pytest.raises(ValueError, match=r"must not both be 0 or next to it, got .* Raise one"):
        Riccati(process, hessian)
