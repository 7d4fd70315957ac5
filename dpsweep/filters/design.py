"""Coefficients for `Iir`: from print, from a textbook design, or from poles and zeros.

Each function gives (a, b) with sum b = 1 + sum a, so that a constant gradient is kept whole.

    name            a               b               noise_gain
    none            -               1               1
    a9_b1           -0.9            0.1             0.053
    a9_b15_m05      -0.9            0.15, -0.05     0.061
    a9_b05_05       -0.9            0.05, 0.05      0.050
    a6_b4           -0.6            0.4             0.250
    a6_b2_2         -0.6            0.2, 0.2        0.200
    a6_b5_m1        -0.6            0.5, -0.1       0.312
    a7_2_b05_05     -0.7, -0.2      0.05, 0.05      0.042

The names hold the digits behind the point, m for minus; every entry of `a` is negative.
Source of the table: Zhang et al., DOPPLER, arXiv:2408.13460, and the DP-PMLF paper after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import cos, fsum, pi
from typing import TYPE_CHECKING

from dpsweep.core.errors import InvalidKey
from dpsweep.filters.iir import ROUNDING_LIMIT, Row, bound_rounding

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    _Polynomials = tuple[NDArray[np.float64], NDArray[np.float64]]
    """Numerator and denominator in 1/z, as scipy.signal gives them."""

Coefficients = tuple[Row, Row]
"""(a, b) of `Iir`."""

COEFFICIENT_SETS: dict[str, Coefficients] = {
    "none": ((), (1.0,)),
    "a9_b1": ((-0.9,), (0.1,)),
    "a9_b15_m05": ((-0.9,), (0.15, -0.05)),
    "a9_b05_05": ((-0.9,), (0.05, 0.05)),
    "a6_b4": ((-0.6,), (0.4,)),
    "a6_b2_2": ((-0.6,), (0.2, 0.2)),
    "a6_b5_m1": ((-0.6,), (0.5, -0.1)),
    "a7_2_b05_05": ((-0.7, -0.2), (0.05, 0.05)),
}
"""Published coefficient sets, by the names of the table above."""

MAX_ORDER = 8
REAL_ANGLE = 1e-5
"""Radians: an angle this close to 0 or pi is that angle, so that 3.14159 is pi."""

_BLOCKED = 1e-9
"""|sum b| over sum |b| up to which zeros are taken to block a constant gradient."""


def butterworth(order: int, cutoff: float) -> Coefficients:
    """The filter whose response is flattest at zero frequency: |H|^2 = 1/2 at the cutoff.

    Args:
        order: 1 to 8. Each one more makes the roll-off steeper by 6 dB per octave.
        cutoff: Share of the Nyquist frequency (half a cycle per step), in (0, 1).

    Raises:
        InvalidKey: A ValueError that names order or cutoff, if one is outside its range or if
            both together ask for more digits than double precision has.

    >>> a, b = butterworth(1, 0.5)     # an average of two neighbours
    >>> [round(x, 9) + 0.0 for x in (*a, *b)]
    [0.0, 0.5, 0.5]
    """
    from scipy import signal

    _check_order_and_cutoff(order, cutoff)
    return _check_precision(lambda n: signal.butter(n, cutoff), order, cutoff)


def chebyshev(order: int, cutoff: float, ripple_db: float) -> Coefficients:
    """Steeper than Butterworth beyond the cutoff, for ripples below it (Chebyshev, type I).

    An even order rises to +ripple_db between zero frequency, where its gain is 1, and cutoff.

    Args:
        order: 1 to 8.
        cutoff: Where the ripples end, share of the Nyquist frequency, in (0, 1).
        ripple_db: Height of the ripples, decibels, in (0, 12].

    Raises:
        InvalidKey: As for `butterworth`; or if it names ripple_db, that is outside its range.
    """
    from scipy import signal

    _check_order_and_cutoff(order, cutoff)
    if not 0 < ripple_db <= 12:
        raise InvalidKey(
            "ripple_db",
            f"ripple_db must lie in (0, 12], got {ripple_db}. It is how far the gain may swing "
            "below the cutoff; near 0 the roll-off is as gentle as butterworth's",
        )
    return _check_precision(lambda n: signal.cheby1(n, ripple_db, cutoff), order, cutoff)


def pole_zero(
    poles: Iterable[tuple[float, float]], zeros: Iterable[tuple[float, float]] = ()
) -> Coefficients:
    """The filter with these poles and zeros, scaled to keep a constant gradient.

    Each entry is (radius, angle in radians). Angle 0 is one real root at +radius, angle pi one
    at -radius, and an angle between stands for a conjugate pair, which counts twice.

    Args:
        poles: Radius in [0, 1), 1 to 8 of them. Near 1 at angle 0, the past fades slowly.
        zeros: Radius 0 or more, at most 8 of them. At radius 1 the frequency of that angle is
            silenced; angle 0 would silence a constant gradient and is refused.

    Raises:
        InvalidKey: A ValueError that names poles or zeros.

    >>> a, b = pole_zero([(0.9, 0.0)])
    >>> a, [round(x, 9) for x in b]
    ((-0.9,), [0.1])
    """
    poles, zeros = tuple(poles), tuple(zeros)
    for i, (radius, angle) in enumerate(poles):
        _check_angle("poles", i, angle)
        if not 0 <= radius < 1:
            raise InvalidKey(
                "poles",
                f"poles[{i}] must have a radius in [0, 1), got {radius}. From 1 on the filter "
                "is unstable: past noise would never fade",
            )
    for i, (radius, angle) in enumerate(zeros):
        _check_angle("zeros", i, angle)
        if not 0 <= radius < float("inf"):
            raise InvalidKey("zeros", f"zeros[{i}] must have a radius of 0 or more, got {radius}")
    down, up = _expand_roots(poles), _expand_roots(zeros)
    for key, polynomial, least in (("poles", down, 1), ("zeros", up, 0)):
        if not least <= (num := len(polynomial) - 1) <= MAX_ORDER:
            raise InvalidKey(
                key,
                f"{key} must be {least} to {MAX_ORDER}, got {num}; an entry whose angle is "
                "neither 0 nor pi is a pair and counts twice",
            )
    if not abs(fsum(up)) > _BLOCKED * fsum(map(abs, up)):
        raise InvalidKey(
            "zeros",
            "zeros must keep away from z = 1 (radius 1, angle 0): there they block a constant "
            f"gradient, and nothing would be learned. Got {list(zeros)}",
        )
    return _scale_to_unit_gain(up, down)


def _check_order_and_cutoff(order: int, cutoff: float) -> None:
    if not (1 <= order <= MAX_ORDER and order == int(order)):
        raise InvalidKey(
            "order", f"order must be a whole number from 1 to {MAX_ORDER}, got {order}"
        )
    if not 0 < cutoff < 1:
        raise InvalidKey(
            "cutoff",
            f"cutoff must lie in (0, 1), got {cutoff}. It is a share of the Nyquist frequency: "
            "0.1 keeps what takes more than 20 steps to swing once",
        )


def _check_precision(
    design: Callable[[int], _Polynomials], order: int, cutoff: float
) -> Coefficients:
    """Return `design(order, cutoff)`, if double precision can hold it."""
    if (share := _estimate_rounding(design(order))) <= ROUNDING_LIMIT:
        return _scale_to_unit_gain(*design(order))
    fits = next(
        (n for n in range(order - 1, 0, -1) if _estimate_rounding(design(n)) <= ROUNDING_LIMIT),
        None,
    )
    raise InvalidKey(
        "cutoff",
        f"cutoff {cutoff:g} is too low for order {order}: the poles lie so close to z = 1 that "
        f"rounding would be {share:.2g} of the output; at most {ROUNDING_LIMIT:g} is taken. "
        + (f"Lower order to {fits}, or raise cutoff" if fits else "Raise cutoff"),
    )


def _estimate_rounding(polynomials: _Polynomials) -> float:
    _, down = polynomials
    return bound_rounding(tuple(map(float, down[1:])))


def _check_angle(key: str, i: int, angle: float) -> None:
    if not 0 <= angle <= pi + REAL_ANGLE:
        raise InvalidKey(
            key,
            f"{key}[{i}] must have an angle in [0, pi] radians, got {angle}. Angles between "
            "stand for a pair, the one at -angle included",
        )


def _expand_roots(roots: tuple[tuple[float, float], ...]) -> Row:
    """The polynomial in 1/z with these roots, coefficient of 1 first: real by construction."""
    import numpy as np

    product = np.ones(1)
    for radius, angle in roots:
        if angle < REAL_ANGLE:
            factor = [1.0, -radius]
        elif angle > pi - REAL_ANGLE:
            factor = [1.0, radius]
        else:
            factor = [1.0, -2 * radius * cos(angle), radius**2]
        product = np.convolve(product, factor)
    return tuple(product.tolist())


def _scale_to_unit_gain(up: Iterable[float], down: Iterable[float]) -> Coefficients:
    """(a, b) with unit gain at zero frequency. The sums are exact, however small they are."""
    a, b = tuple(map(float, down)), tuple(map(float, up))
    scale = fsum(a) / fsum(b)
    return a[1:], tuple(scale * x for x in b)
