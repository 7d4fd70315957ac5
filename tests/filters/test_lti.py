"""Ema does to a signal what its two describing numbers say."""

import math

import pytest
import torch

from dpsweep.core.types import Released
from dpsweep.filters.base import Public
from dpsweep.filters.lti import Ema

GAINS = [0.05, 0.3, 0.7, 1.0]
NOWHERE = Public(step=0, params={}, noise_std=0.0)


def run(ema: Ema, signal_T: torch.Tensor) -> torch.Tensor:
    """Feeds `signal_T`, shape (T, ...), one row per step; same shape back."""
    state, out = ema.init({}), []
    for g in signal_T:
        filtered, state = ema.apply(Released({"w": g}), state, NOWHERE)
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
