"""Low-pass filters of any order, in the direct form that papers publish.

A filter is two rows of numbers: `a` feeds back what came out, `b` weighs what goes in. Not every
pair is a filter one may train with. What is refused, and why, is said in `Iir`; a refusal is an
`InvalidKey`, a ValueError that names the row at fault, so that a config can point at its own key.

Read filters/lti.py first: it says what the two describing numbers of a filter are.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import fsum, isfinite
from sys import float_info
from typing import TYPE_CHECKING, ClassVar, TypeVar

from dpsweep.core.errors import InvalidKey
from dpsweep.core.types import Released, Tensors
from dpsweep.filters.base import Public, State

if TYPE_CHECKING:
    import torch

Row = tuple[float, ...]
Number = TypeVar("Number", float, "torch.Tensor")

DC_TOLERANCE = 1e-6
"""Largest distance of sum b / (1 + sum a) from 1."""

ROUNDING_LIMIT = 1e-4
"""Largest share of the output that may be rounding of double precision."""

_HORIZON = 2**16
"""Steps over which the bias correction is seen to stay positive."""


@dataclass(frozen=True)
class Iir:
    """Recursive low-pass filter with bias correction (DOPPLER's).

        m_t = - sum_{r>=1} a_r m_{t-r} + sum_{r>=0} b_r r_{t-r},     m, r = 0 before step 0
        c_t = the same recursion fed with ones
        g~_t = m_t / c_t

    Dividing by c_t undoes the zeros it starts from: a constant gradient comes out whole from
    the first step on, and the first release comes out as it is.

    The sums run in double, and m is remembered in double, whatever the gradient's precision:
    the direct form magnifies rounding by sum|a| / (1 + sum a), which is 10^7 for a Butterworth
    filter of order 4 with cutoff 0.01, and float32 has seven digits. The price is 8 bytes per
    parameter and entry of `a`; releases are remembered as they came, for each entry of `b` but
    the first. Where even double loses more than 1e-4 of the output, the filter is refused.

    Stability is decided without rounding, by the Schur-Cohn recursion on fractions: computed
    roots of an accepted low-pass filter may be off by more than their distance to the circle.

    Raises:
        InvalidKey: A ValueError that names a or b. If a number is not finite; if a pole, a root of
            z^na + a_1 z^(na-1) + ..., has radius 1 or more, or lies closer to z = 1 than double
            precision can tell; if b is empty, begins with 0 or has the wrong sum; or if some
            c_t of the first 65 536 steps is not positive, which would turn the gradient around.

    Source: Zhang et al., DOPPLER, arXiv:2408.13460.

    >>> round(Iir(a=(-0.9,), b=(0.1,)).noise_gain, 6)     # Ema(0.1), but for the first steps
    0.052632
    """

    over_time: ClassVar[bool] = True
    dc_gain = 1.0

    a: Row  # feedback, a_1..a_na. The leading 1 of scipy's `a` is left out. Empty: no recursion
    b: Row  # input weights, b_0..b_nb, with sum b = 1 + sum a up to a share of 1e-6

    def __post_init__(self) -> None:
        # in this order: later checks rely on finite numbers and on a stable filter
        for key, row in (("a", self.a), ("b", self.b)):
            if not all(isfinite(x) for x in row):
                raise InvalidKey(
                    key, f"Iir.{key} must hold finite numbers only, got {format_row(row)}"
                )
        if not self.b:
            raise InvalidKey("b", "Iir.b is empty: nothing would go in. Without a filter, b is [1]")
        if self.b[0] == 0:
            raise InvalidKey(
                "b",
                f"Iir.b begins with 0, got {format_row(self.b)}: c_0 = b_0 = 0, and the bias "
                "correction divides by it. Drop the leading zeros; they only delay",
            )
        self._check_poles()
        self._check_constant_gradient()
        self._check_bias_correction()

    def _check_poles(self) -> None:
        if _sum_energy(self.a, self.b) is None:
            import numpy as np

            pole = max(np.roots((1.0, *self.a)), key=abs)
            radius = max(abs(pole), 1.0)  # the exact test knows better than a computed root
            raise InvalidKey(
                "a",
                f"Iir.a = {format_row(self.a)} is unstable: it has a pole at "
                f"z = {_format_complex(pole)}, of radius {radius:.9g}, and past noise would "
                "never fade. Every root of z^na + a_1 z^(na-1) + ... must have a radius below 1; "
                "mind the sign, m_t = 0.9 m_{t-1} + ... is a = [-0.9]",
            )
        if not (share := bound_rounding(self.a)) <= ROUNDING_LIMIT:
            raise InvalidKey(
                "a",
                f"Iir.a = {format_row(self.a)} has poles so close to z = 1 that rounding would be "
                f"{share:.2g} of the output; at most {ROUNDING_LIMIT:g} is taken. Lower the "
                "order, or move the poles away from z = 1 (a higher cutoff does)",
            )

    def _check_constant_gradient(self) -> None:
        sum_b, wanted = fsum(self.b), fsum((1.0, *self.a))
        if sum_b == 0:
            raise InvalidKey(
                "b",
                f"Iir.b = {format_row(self.b)} has sum 0: the filter blocks a constant gradient, "
                f"and nothing would be learned. The sum must be 1 + sum a = {wanted:.9g}",
            )
        if not abs(sum_b - wanted) <= DC_TOLERANCE * wanted:  # so written, NaN fails too
            mended = tuple(x * (wanted / sum_b) for x in self.b)
            turned = tuple(-x for x in self.a)
            fits = abs(sum_b - fsum((1.0, *turned))) <= DC_TOLERANCE * abs(sum_b)
            raise InvalidKey(
                "b",
                f"Iir.b = {format_row(self.b)} has sum {sum_b:.9g}, but 1 + sum a = {wanted:.9g}: "
                f"a constant gradient would come out times {sum_b / wanted:.9g}. "
                f"Use b = {format_row(mended, digits=12)}"
                + (f", or a = {format_row(turned)} if its signs are turned" if fits else ""),
            )

    def _check_bias_correction(self) -> None:
        if self.b[0] > 0 and min(self.b) >= 0 >= max(self.a, default=0.0):
            return  # every c_t is a sum of positive terms
        import numpy as np
        from scipy import signal

        # signs of both kinds: no closed form, so the first _HORIZON steps are computed
        c_T = signal.lfilter(self.b, (1.0, *self.a), np.ones(_HORIZON))
        if wrong := np.flatnonzero(~(c_T > 0)).tolist():
            t = wrong[0]
            raise InvalidKey(
                "b",
                f"Iir with a = {format_row(self.a)}, b = {format_row(self.b)} has "
                f"c_{t} = {c_T[t]:.6g} at step {t}: the bias correction divides "
                "by c_t, which must stay above 0, or it turns the gradient around. Let b begin "
                "with a positive number, and keep what is negative in b smaller",
            )

    @property
    def settled(self) -> float:
        """c_t as t grows: 1 within DC_TOLERANCE."""
        return fsum(self.b) / fsum((1.0, *self.a))

    @cached_property
    def noise_gain(self) -> float:
        """Sum of squared impulse response, without rounding until the end; reached as t grows."""
        energy = _sum_energy(self.a, self.b)
        assert energy is not None, "an unstable filter cannot be made"
        return float(energy) / self.settled**2

    def frequency_response(self, w: torch.Tensor) -> torch.Tensor:
        """Complex gain at each angular frequency in `w`, shape (W,), radians per step."""
        back = (-1j * w).exp()
        return (
            _evaluate_polynomial(self.b, back)
            / _evaluate_polynomial((1.0, *self.a), back)
            / self.settled
        )

    def init(self, params: Tensors) -> State:
        """Return an empty past (m, r, c): each newest first, and as long as there are values."""
        return (), (), ()

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        past_m, past_r, past_c = state
        # m in double, or rounding would grow by sum|a| / (1 + sum a); r stays as released, since
        # sums of it do not feed back
        seen = (grad, *past_r)
        m = {
            k: _advance_recursion(
                self.b, [r[k].double() for r in seen], self.a, [m[k] for m in past_m]
            )
            for k in grad
        }
        c = _advance_recursion(self.b, [1.0] * len(seen), self.a, past_c)
        out = Released({k: (m[k] / c).to(g.dtype) for k, g in grad.items()})
        num_a, num_r = len(self.a), len(self.b) - 1
        return out, ((m, *past_m)[:num_a], seen[:num_r], (c, *past_c)[:num_a])


def bound_rounding(a: Row) -> float:
    """Bound the share of a settled output that may be rounding; often ten times too high."""
    magnified = float_info.epsilon * fsum(map(abs, a))
    distance = abs(fsum((1.0, *a)))  # of z = 1 from the poles; fsum, as the terms nearly cancel
    return magnified / distance if distance else float("inf")


def format_row(row: Row, digits: int = 6) -> str:
    """Format a row as a sweep file has it."""
    return f"[{', '.join(f'{x:.{digits}g}' for x in row)}]"


def _advance_recursion(
    b: Row, inputs: list[Number], a: Row, outputs: list[Number] | tuple[Number, ...]
) -> Number:
    """Compute one step of the direct form, histories newest first; missing entries are 0."""
    total = b[0] * inputs[0]
    # not strict: before step 0 there is no past, and zip ends where it does
    for weight, x in zip(b[1:], inputs[1:], strict=False):
        total = total + weight * x
    for weight, x in zip(a, outputs, strict=False):
        total = total - weight * x
    return total


def _sum_energy(a: Row, b: Row) -> Fraction | None:
    """Sum of squared impulse response of b / (1, a), exact; None if it does not fade.

    The Schur-Cohn recursion takes one order off the feedback polynomial at a time. All roots
    lie inside the unit circle if and only if each step's last coefficient is smaller than its
    first; the numerator taken along gives the sum of squares (Astrom, Introduction to
    Stochastic Control Theory, 1970, section 5.2). Floats are fractions, so nothing is rounded.
    """
    order = max(len(a), len(b) - 1)
    down = _to_fractions((1.0, *a), order)
    up = _to_fractions(b, order)
    total = Fraction(0)
    for k in range(order, 0, -1):
        if abs(down[k]) >= down[0]:
            return None
        total += up[k] ** 2 / down[0]
        reflection, tap = down[k] / down[0], up[k] / down[0]
        up = [up[i] - tap * down[k - i] for i in range(k)]
        down = [down[i] - reflection * down[k - i] for i in range(k)]
    return total + up[0] ** 2 / down[0]


def _to_fractions(row: Row, order: int) -> list[Fraction]:
    return [*map(Fraction, row), *[Fraction(0)] * (order + 1 - len(row))]


def _evaluate_polynomial(row: Row, x: torch.Tensor) -> torch.Tensor:
    """Sum of row_r x^r."""
    total = x.new_zeros(x.shape)
    for weight in reversed(row):
        total = total * x + weight
    return total


def _format_complex(z: complex) -> str:
    return f"{z.real:.9g}" if z.imag == 0 else f"{z.real:.6g} +- {abs(z.imag):.6g}j"
