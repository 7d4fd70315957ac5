"""Designs keep a constant gradient whole and put poles, zeros and cutoff where they are asked."""

import math

import numpy as np
import pytest
import torch
from scipy import signal

from dpsweep.core.errors import InvalidKey
from dpsweep.filters import design
from dpsweep.filters.design import COEFFICIENT_SETS, butterworth, chebyshev, pole_zero
from dpsweep.filters.iir import Iir

ORDERS = range(1, 9)
CUTOFFS = [0.1, 0.3, 0.8]


def gain_at(filter_: Iir, cutoff: float) -> float:
    """|H| at a share of the Nyquist frequency."""
    w = torch.tensor([cutoff * math.pi], dtype=torch.float64)
    return filter_.frequency_response(w).abs().item()


@pytest.mark.parametrize("cutoff", CUTOFFS)
@pytest.mark.parametrize("order", ORDERS)
def test_butterworth_has_half_the_power_at_the_cutoff_and_is_flat_below(order, cutoff):
    filter_ = Iir(*butterworth(order, cutoff))
    assert gain_at(filter_, cutoff) ** 2 == pytest.approx(0.5, rel=1e-6)
    w = torch.linspace(0, math.pi, 300, dtype=torch.float64)
    power = filter_.frequency_response(w).abs().square()
    assert (power.diff() < 1e-9).all()  # falls all the way
    # |H|^2 = 1 / (1 + (tan(w/2) / tan(cutoff pi/2))^(2 order)), but for w = pi, where it is 0
    warped = (torch.tan(w[:-1] / 2) / math.tan(cutoff * math.pi / 2)) ** (2 * order)
    torch.testing.assert_close(power[:-1], 1 / (1 + warped), rtol=0, atol=1e-6)


@pytest.mark.parametrize("ripple_db", [0.5, 3.0])
@pytest.mark.parametrize("order", ORDERS)
def test_chebyshev_swings_by_its_ripple_below_the_cutoff(order, ripple_db):
    filter_ = Iir(*chebyshev(order, 0.3, ripple_db))
    w = torch.linspace(0, 0.3 * math.pi, 4000, dtype=torch.float64)
    decibels = 20 * filter_.frequency_response(w).abs().log10()
    assert decibels.max() - decibels.min() == pytest.approx(ripple_db, rel=1e-3)
    lowest, highest = (0.0, ripple_db) if order % 2 == 0 else (-ripple_db, 0.0)
    assert decibels.min() == pytest.approx(lowest, abs=1e-3 * ripple_db)
    assert decibels.max() == pytest.approx(highest, abs=1e-3 * ripple_db)


@pytest.mark.parametrize("order", [3, 5, 7])  # an even one is raised by its ripple everywhere
def test_chebyshev_is_steeper_than_butterworth(order):
    gentle, steep = Iir(*butterworth(order, 0.2)), Iir(*chebyshev(order, 0.2, 1.0))
    assert gain_at(steep, 0.5) < gain_at(gentle, 0.5)


@pytest.mark.parametrize("family", [butterworth, lambda n, f: chebyshev(n, f, 1.0)])
@pytest.mark.parametrize("order", ORDERS)
def test_sums_agree_to_the_last_digits(family, order):
    a, b = family(order, 0.15)
    assert math.fsum(b) == pytest.approx(math.fsum((1.0, *a)), rel=1e-14)
    assert len(a) == len(b) - 1 == order


def test_coefficients_are_scipys():
    up, down = signal.butter(3, 0.25)
    a, b = butterworth(3, 0.25)
    np.testing.assert_allclose(a, down[1:], rtol=1e-15)
    np.testing.assert_allclose(b, up, rtol=1e-12)


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_printed_set_is_a_filter_with_unit_gain_at_zero_frequency(name):
    a, b = COEFFICIENT_SETS[name]
    assert Iir(a, b).settled == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_name_of_a_printed_set_spells_its_digits(name):
    a, b = COEFFICIENT_SETS[name]
    assert all(x < 0 for x in a)
    rows = (
        [f"{x:g}".replace("-", "m").replace("0.", "") for x in row] for row in ([-x for x in a], b)
    )
    spelled = "_".join(letter + "_".join(row) for letter, row in zip("ab", rows, strict=True))
    assert name == (spelled if a else "none")


def test_no_filter_is_among_the_printed():
    assert COEFFICIENT_SETS["none"] == ((), (1.0,))


def test_docstring_table_is_the_printed_sets_with_their_noise_gain():
    rows = design.__doc__.split("noise_gain\n")[1].split("\n\n")[0]
    table = [row.split() for row in rows.splitlines()]
    for name, *numbers, gain in table:
        a, b = COEFFICIENT_SETS[name]
        values = [float(x.strip(",")) for x in numbers if x != "-"]
        assert values == [*a, *b]
        assert float(gain) == pytest.approx(Iir(a, b).noise_gain, abs=5.1e-4)
    assert [line[0] for line in table] == list(COEFFICIENT_SETS)


@pytest.mark.parametrize(
    ("poles", "zeros"),
    [
        ([(0.9, 0.0)], []),
        ([(0.9, math.pi)], [(1.0, math.pi)]),
        ([(0.9, 0.3)], [(1.0, 2.0)]),
        ([(0.5, 0.0), (0.8, 1.0), (0.3, math.pi)], [(0.2, 0.0), (1.5, 2.5)]),
    ],
)
def test_poles_and_zeros_are_where_they_are_asked(poles, zeros):
    a, b = pole_zero(poles, zeros)
    for row, asked in (((1.0, *a), poles), (b, zeros)):
        expected = [r * np.exp(1j * s * angle) for r, angle in asked for s in (1, -1)]
        # An angle of 0 or pi stands for one root: the two above are the same.
        expected = [z for i, z in enumerate(expected) if i % 2 == 0 or abs(z.imag) > 1e-9]
        np.testing.assert_allclose(
            np.sort_complex(np.round(np.roots(row), 9)),
            np.sort_complex(np.round(np.array(expected, dtype=complex), 9)),
            atol=1e-8,
        )
    assert math.fsum(b) == pytest.approx(math.fsum((1.0, *a)), rel=1e-14)


def test_pi_as_people_type_it_is_one_real_root():
    assert pole_zero([(0.9, 0.0)], [(1.0, 3.14159)]) == pole_zero([(0.9, 0.0)], [(1.0, math.pi)])
    assert pole_zero([(0.9, 0.0)], [(1.0, 3.1416)]) == pole_zero([(0.9, 0.0)], [(1.0, math.pi)])


def test_one_real_pole_is_the_printed_filter():
    (a,), (b,) = pole_zero([(0.9, 0.0)])
    assert (a, b) == (-0.9, pytest.approx(0.1))


@pytest.mark.parametrize("order", [0, 9, -1, 2.5, math.nan])
def test_order_outside_its_range_is_refused(order):
    with pytest.raises(InvalidKey, match="order must be a whole number from 1 to 8, got") as e:
        butterworth(order, 0.1)
    assert e.value.key == "order"


@pytest.mark.parametrize("cutoff", [0.0, 1.0, -0.5, math.nan, math.inf])
def test_cutoff_outside_the_open_unit_interval_is_refused(cutoff):
    with pytest.raises(InvalidKey, match=r"cutoff must lie in \(0, 1\), got .* Nyquist") as e:
        chebyshev(2, cutoff, 1.0)
    assert e.value.key == "cutoff"


@pytest.mark.parametrize("ripple_db", [0.0, -1.0, 13.0, math.nan])
def test_ripple_outside_its_range_is_refused(ripple_db):
    with pytest.raises(InvalidKey, match=r"ripple_db must lie in \(0, 12\], got") as e:
        chebyshev(2, 0.1, ripple_db)
    assert e.value.key == "ripple_db"


@pytest.mark.parametrize("cutoff", [0.01, 0.0005])
def test_design_beyond_double_precision_is_refused_and_an_order_that_works_is_named(cutoff):
    with pytest.raises(
        InvalidKey, match=r"too low for order 8: .* Lower order to \d, or raise"
    ) as e:
        butterworth(8, cutoff)
    assert e.value.key == "cutoff"
    order = int(str(e.value).split("Lower order to ")[1][0])
    assert Iir(*butterworth(order, cutoff)).noise_gain < 1.1 * cutoff
    with pytest.raises(InvalidKey, match="too low"):
        butterworth(order + 1, cutoff)


def test_cutoff_too_low_for_every_order_says_so():
    with pytest.raises(InvalidKey, match=r"too low for order 2: .* is taken\. Raise cutoff$"):
        butterworth(2, 1e-14)


@pytest.mark.parametrize("radius", [1.0, 1.2, -0.1, math.nan])
def test_pole_radius_outside_its_range_is_refused(radius):
    with pytest.raises(InvalidKey, match=r"poles\[1\] must have a radius in \[0, 1\), got") as e:
        pole_zero([(0.5, 0.0), (radius, 0.3)])
    assert e.value.key == "poles"


@pytest.mark.parametrize("radius", [-0.1, math.nan, math.inf])
def test_zero_radius_outside_its_range_is_refused(radius):
    with pytest.raises(InvalidKey, match=r"zeros\[0\] must have a radius of 0 or more, got") as e:
        pole_zero([(0.5, 0.0)], [(radius, 0.3)])
    assert e.value.key == "zeros"


@pytest.mark.parametrize("angle", [-0.1, 3.2, math.nan])
@pytest.mark.parametrize("key", ["poles", "zeros"])
def test_angle_outside_its_range_is_refused(key, angle):
    roots = {"poles": [(0.5, 0.0)], "zeros": []} | {key: [(0.5, angle)]}
    with pytest.raises(
        InvalidKey, match=rf"{key}\[0\] must have an angle in \[0, pi\] radians, got"
    ):
        pole_zero(**roots)


@pytest.mark.parametrize(
    ("poles", "zeros", "key", "num"),
    [
        ([], [(0.5, 0.0)], "poles", 0),
        ([(0.5, 1.0)] * 5, [], "poles", 10),
        ([(0.5, 1.0)], [(0.5, 1.0)] * 4 + [(0.5, 0.0)], "zeros", 9),
    ],
)
def test_number_of_roots_counts_pairs_twice_and_has_a_limit(poles, zeros, key, num):
    with pytest.raises(InvalidKey, match=rf"{key} must be \d to 8, got {num}; .* counts twice"):
        pole_zero(poles, zeros)


@pytest.mark.parametrize("zero", [(1.0, 0.0), (1.0, 5e-6), (1.0, 2e-5)])
def test_zero_that_blocks_a_constant_gradient_is_refused(zero):
    with pytest.raises(InvalidKey, match=r"zeros must keep away from z = 1 .* Got \[\(1\.0, ") as e:
        pole_zero([(0.9, 0.0)], [zero])
    assert e.value.key == "zeros"
