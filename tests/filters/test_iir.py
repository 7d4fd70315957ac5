"""Iir is scipy's filter with the initialisation bias divided out; what cannot work is refused."""

import math

import numpy as np
import pytest
import torch
from scipy import signal

from dpsweep.core.errors import InvalidKey
from dpsweep.core.types import Released
from dpsweep.filters.base import Public
from dpsweep.filters.design import COEFFICIENT_SETS, butterworth, chebyshev, pole_zero
from dpsweep.filters.iir import Iir
from dpsweep.filters.lti import Ema

DESIGNS = {
    "fir": ((), (0.5, 0.3, 0.2)),
    "more_a_than_b": ((-0.5, -0.2, 0.1), (0.4,)),
    "more_b_than_a": ((-0.5,), (0.1, 0.1, 0.1, 0.2)),
    "butterworth_2": butterworth(2, 0.1),
    "butterworth_4": butterworth(4, 0.3),
    "chebyshev_3": chebyshev(3, 0.2, 1.0),
    "chebyshev_even": chebyshev(4, 0.4, 3.0),
    "poles": pole_zero([(0.9, 0.0), (0.8, 0.5)], [(1.0, math.pi), (0.7, 1.5)]),
    "resonance": pole_zero([(0.97, 0.4)]),
}
COEFFICIENTS = COEFFICIENT_SETS | DESIGNS
every_filter = pytest.mark.parametrize(("a", "b"), COEFFICIENTS.values(), ids=COEFFICIENTS)


def run(filter_: Iir | Ema, signal_T: torch.Tensor) -> torch.Tensor:
    """Feeds `signal_T`, shape (T, ...), one row per step; same shape back."""
    state, out = filter_.init({}), []
    for t, g in enumerate(signal_T):
        public = Public(step=t, params={}, noise_std=0.0)
        filtered, state = filter_.apply(Released({"w": g}), state, public)
        out.append(filtered["w"])
    return torch.stack(out)


def white(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@every_filter
def test_output_is_scipys_divided_by_scipys_answer_to_ones(a, b):
    noise = white(200, 3)
    m_T = signal.lfilter(b, (1.0, *a), noise.numpy(), axis=0)
    c_T = signal.lfilter(b, (1.0, *a), np.ones((200, 1)), axis=0)
    expected = torch.from_numpy(m_T / c_T)
    torch.testing.assert_close(run(Iir(a, b), noise), expected, rtol=1e-12, atol=1e-12)


@every_filter
def test_constant_gradient_passes_unchanged_from_the_first_step(a, b):
    constant = torch.full((300, 2), 3.7, dtype=torch.float64)
    torch.testing.assert_close(run(Iir(a, b), constant), constant, rtol=0, atol=1e-12)


@every_filter
def test_first_release_comes_out_as_it_is(a, b):
    noise = white(1, 5)
    torch.testing.assert_close(run(Iir(a, b), noise), noise, rtol=1e-15, atol=0)


@every_filter
def test_white_noise_variance_shrinks_by_noise_gain(a, b):
    noise = white(300, 4096, dtype=torch.float32)
    settled = run(Iir(a, b), noise)[-1]
    # 4096 independent draws: the sample variance has relative standard deviation
    # sqrt(2/4095) = 2.2 %, so 5 of them make a false alarm a one-in-two-million event.
    # After 300 steps the slowest pole here, of radius 0.97, has faded to 1e-4.
    assert settled.var().item() == pytest.approx(Iir(a, b).noise_gain, rel=5 * math.sqrt(2 / 4095))


@every_filter
def test_noise_gain_is_the_sum_of_squares_of_scipys_impulse_response(a, b):
    impulse = np.zeros(20_000)
    impulse[0] = 1.0
    squares = np.square(signal.lfilter(b, (1.0, *a), impulse)).sum()
    assert Iir(a, b).noise_gain == pytest.approx(squares, rel=1e-11)


@every_filter
def test_measured_response_matches_formula(a, b):
    filter_, n, late = Iir(a, b), 1024, 600
    impulse = torch.zeros(n + late, dtype=torch.float64)
    impulse[late] = 1.0  # c_t has settled by then: 0.97^600 = 1e-8
    measured = torch.fft.rfft(run(filter_, impulse)[late:])
    w = torch.linspace(0, math.pi, n // 2 + 1, dtype=torch.float64)
    torch.testing.assert_close(measured, filter_.frequency_response(w), rtol=0, atol=1e-6)


@every_filter
def test_response_is_scipys_and_one_at_zero_frequency(a, b):
    w = np.linspace(0, math.pi, 200)
    _, expected = signal.freqz(b, (1.0, *a), worN=w)
    response = Iir(a, b).frequency_response(torch.from_numpy(w))
    torch.testing.assert_close(response, torch.from_numpy(expected), rtol=1e-9, atol=1e-12)
    assert abs(response[0].item() - 1) < 1e-12


def test_noise_gain_of_a_slow_filter_of_high_order_is_exact():
    # The energy of a design far below the Nyquist frequency follows the analogue filter's,
    # pi cutoff times a constant, so that half the cutoff has half of it.
    slow, slower = Iir(*butterworth(4, 0.01)), Iir(*butterworth(4, 0.005))
    assert slow.noise_gain / slower.noise_gain == pytest.approx(2, rel=1e-3)
    assert slow.noise_gain == pytest.approx(0.0102615, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_b_of_one_is_no_filter_bit_for_bit(dtype):
    noise = white(10, 7, dtype=dtype)
    assert torch.equal(run(Iir(a=(), b=(1.0,)), noise), noise)


@pytest.mark.parametrize("gain", [0.1, 0.4, 1.0])
def test_first_order_filter_is_the_exponential_average_once_settled(gain):
    noise = white(400, 3)
    iir, ema = run(Iir(a=(-(1 - gain),), b=(gain,)), noise), run(Ema(gain), noise)
    torch.testing.assert_close(iir[-50:], ema[-50:], rtol=0, atol=1e-12)
    if gain < 1:  # at first they differ: Ema takes the first gradient for the whole past
        assert not torch.allclose(iir[1], ema[1])


def test_slow_filter_of_high_order_keeps_a_constant_float32_gradient():
    constant = torch.full((600, 4), 0.3)
    out = run(Iir(*butterworth(4, 0.02)), constant)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, constant, rtol=1e-6, atol=0)


def test_slow_filter_of_high_order_filters_float32_as_it_does_float64():
    filter_, noise = Iir(*butterworth(4, 0.02)), white(600, 4, dtype=torch.float32)
    exact = run(filter_, noise.double())
    torch.testing.assert_close(run(filter_, noise).double(), exact, rtol=1e-6, atol=1e-8)


def test_only_what_is_needed_is_remembered():
    a, b = (-0.5, 0.1), (0.2, 0.2, 0.1, 0.1)
    filter_ = Iir(a, b)
    state = filter_.init({})
    for t in range(9):
        grad = Released({"w": torch.ones(2)})
        _, state = filter_.apply(grad, state, Public(t, {}, 0.0))
        assert [len(history) for history in state] == [min(t + 1, n) for n in (2, 3, 2)]
    past_m, past_r, past_c = state
    assert {m["w"].dtype for m in past_m} == {torch.float64}
    assert {r["w"].dtype for r in past_r} == {torch.float32}
    assert {type(c) for c in past_c} == {float}


def test_slow_high_order_filter_is_accepted():
    assert Iir(*butterworth(4, 0.01)).noise_gain < 0.011


def test_trailing_zeros_of_a_change_nothing():
    padded, plain = Iir((-1.5, 0.56, 0.0), (0.06,)), Iir((-1.5, 0.56), (0.06,))
    assert padded.noise_gain == plain.noise_gain
    assert torch.equal(run(padded, white(20, 2)), run(plain, white(20, 2)))


@pytest.mark.parametrize("radius", [0.9999999, -0.9999999])
def test_pole_just_inside_the_circle_is_accepted(radius):
    assert Iir(a=(-radius,), b=(1 - radius,)).a == (-radius,)


@pytest.mark.parametrize(
    ("a", "pole", "radius"),
    [
        ((-1.0,), "1", "1"),
        ((1.0,), "-1", "1"),
        ((-1.1,), "1.1", "1.1"),
        ((-2.0, 1.0), "1", "1"),
        ((0.0, 1.0), r"-?0 \+- 1j", "1"),
        ((-2.4, 1.44), "1.2", "1.2"),
        ((0.0, 0.0, -1.331), r"\S+( \+- \S+j)?", "1.1"),  # three of one radius
        ((-2.4, 1.44, 0.0, 0.0), "1.2", "1.2"),
    ],
)
def test_pole_on_or_outside_the_circle_is_refused(a, pole, radius):
    sum_b = 1 + math.fsum(a)
    with pytest.raises(
        InvalidKey, match=rf"unstable: .* pole at z = {pole}, of radius {radius},"
    ) as e:
        Iir(a, (sum_b or 1.0,))
    assert e.value.key == "a"


@pytest.mark.parametrize("seed", range(3))
def test_stability_is_that_of_the_roots(seed):
    rng = np.random.default_rng(seed)
    verdicts = set()
    for _ in range(40):
        a = tuple(rng.normal(scale=0.5, size=int(rng.integers(1, 6))).tolist())
        stable = np.abs(np.roots((1.0, *a))).max() < 1
        try:
            Iir(a, (1 + math.fsum(a),))
            accepted = True
        except InvalidKey as e:
            accepted = "unstable" not in str(e)
        assert accepted == stable, a
        verdicts.add(accepted)
    assert verdicts == {True, False}


def test_pole_too_close_for_double_precision_is_refused():
    a = tuple(np.poly([0.9999] * 4)[1:].tolist())
    with pytest.raises(
        InvalidKey, match=r"poles so close to z = 1 that rounding would be .* Lower"
    ):
        Iir(a, (1 + math.fsum(a),))


@pytest.mark.parametrize(
    ("a", "b", "sums", "remedy"),
    [
        ((-0.9,), (0.2,), r"0\.2, but 1 \+ sum a = 0\.1", r"times 2\. Use b = \[0\.1\]$"),
        ((-0.9,), (0.2, 0.2), "0.4, but", r"times 4\. Use b = \[0\.05, 0\.05\]$"),
        ((), (0.5,), "0.5, but", r"Use b = \[1\]$"),
        ((-0.9,), (-0.1,), "-0.1, but", r"times -1\. Use b = \[0\.1\]$"),
        ((0.9,), (0.1,), "0.1, but", r"Use b = \[1\.9\], or a = \[-0\.9\] if its signs are"),
    ],
)
def test_other_gain_at_zero_frequency_is_refused_and_the_right_b_is_printed(a, b, sums, remedy):
    with pytest.raises(InvalidKey, match=rf"has sum {sums}.*{remedy}") as e:
        Iir(a, b)
    assert e.value.key == "b"


@pytest.mark.parametrize(("off", "taken"), [(5e-7, True), (-5e-7, True), (2e-6, False)])
def test_tolerance_of_the_gain_is_relative_also_where_the_sums_are_tiny(off, taken):
    a, b = butterworth(4, 0.01)  # sum b = 9e-7: an absolute tolerance would take anything
    b = tuple(x * (1 + off) for x in b)
    if taken:
        filter_ = Iir(a, b)
        assert filter_.settled == pytest.approx(1 + off, abs=1e-8)
        assert filter_.noise_gain == pytest.approx(Iir(*butterworth(4, 0.01)).noise_gain, rel=1e-9)
        return
    with pytest.raises(InvalidKey, match=r"times 1\.000002"):
        Iir(a, b)


def test_filter_that_blocks_a_constant_gradient_is_refused():
    with pytest.raises(
        InvalidKey, match=r"has sum 0: the filter blocks a constant .* 1 \+ sum a = 0"
    ):
        Iir(a=(-0.5,), b=(0.5, -0.5))


def test_empty_b_is_refused():
    with pytest.raises(InvalidKey, match=r"Iir\.b is empty: .* b is \[1\]"):
        Iir(a=(-0.9,), b=())


def test_b_that_begins_with_zero_is_refused():
    with pytest.raises(InvalidKey, match=r"Iir\.b begins with 0, got \[0, 0\.1\]: c_0 = b_0 = 0"):
        Iir(a=(-0.9,), b=(0.0, 0.1))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", ["a", "b"])
def test_numbers_that_are_not_finite_are_refused(key, number):
    rows = {"a": (-0.9,), "b": (0.1,)} | {key: (number,)}
    with pytest.raises(InvalidKey, match=rf"Iir\.{key} must hold finite numbers only, got") as e:
        Iir(**rows)
    assert e.value.key == key


@pytest.mark.parametrize(
    ("a", "b", "t", "c_t"),
    [
        ((-0.9,), (-0.1, 0.2), 0, r"-0\.1"),
        ((-0.9,), (0.1, -1.0, 1.0), 1, r"-0\.81"),
        ((), (1.0, 0.5, -1.5, 1.0), 2, "0"),
        ((-0.5,), (1.0, 0.0, 0.0, 0.0, -2.5, 2.0), 4, r"-0\.5625"),
    ],
)
def test_bias_correction_that_turns_the_gradient_around_is_refused(a, b, t, c_t):
    with pytest.raises(InvalidKey, match=rf"has c_{t} = {c_t} at step {t}: the bias correction"):
        Iir(a, b)


def test_misfit_is_a_value_error():
    with pytest.raises(ValueError, match="unstable"):
        Iir(a=(-2.0,), b=(-1.0,))
