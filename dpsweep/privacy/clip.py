"""Clipping: the one place where per-example gradients are bounded and summed.

Each style here has sensitivity `clip_norm`: adding or removing one example moves the sum
by at most that, in L2 over all parameters together. A gradient that is not finite, or so
large that its norm overflows, counts as zero: a NaN would otherwise pass every comparison
and carry one example past the bound.
"""

from __future__ import annotations

import cmath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, isclose, sqrt
from typing import TYPE_CHECKING, Protocol

from dpsweep.core.flat import convert
from dpsweep.core.types import Clipped, PerExample, Released, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INSIDE = "clip/inside"
"""Name of the extra coordinate in which `Quantile` counts; no parameter has a slash."""


LEAST_NORM, MOST_NORM = 1e-6, 1e6
"""Clip norms far enough from where float32 can neither square nor tell numbers."""

SUMMED = 320
"""Examples whose gradients are added in their own precision; sums of more are added in double. In
float32 an example made for it can move the rounding of n others' sum by n^2 2^-26 clip norms, and
one after it in each sum of n by as much again."""

LARGEST_SQUARE = 1e36
"""Largest squared norm for which float32 has a clipping factor."""


class Clip(Protocol):
    """A style of clipping."""

    @property
    def clip_norm(self) -> float:
        """L2 bound on one example's gradient over all parameters, in gradient units."""

    def factors(self, squares: Tensors) -> Tensors:
        """Compute the clipping factor of each parameter's part of each gradient.

        Args:
            squares: Parameter name -> squared L2 norm of its part of the gradient, shape (B,).

        Returns:
            Parameter name -> factors, shape (B,); the whole then has norm at most `clip_norm`.
        """


@dataclass(frozen=True)
class Flat:
    """min(1, C / |u|): gradients inside the ball stay as they are (Abadi et al. 2016)."""

    clip_norm: float

    def factors(self, squares: Tensors) -> Tensors:
        factor_B = (self.clip_norm / _norm(squares)).clamp(max=1)  # C / 0 is inf, clamped to 1
        return dict.fromkeys(squares, factor_B)


@dataclass(frozen=True)
class Automatic:
    """C / (|u| + s): every gradient is scaled to nearly C (Bu et al. 2023, arXiv:2206.07136).

    Attributes:
        stability: s, in gradient units; keeps the smallest gradients from blowing up.
    """

    clip_norm: float
    stability: float = 0.01

    def factors(self, squares: Tensors) -> Tensors:
        return dict.fromkeys(squares, self.clip_norm / (_norm(squares) + self.stability))


@dataclass(frozen=True)
class PerLayer:
    """min(1, C_l / |u_l|) in each layer l, with C^2 = sum_l C_l^2.

    A layer is a module with parameters of its own, bias included.

    Attributes:
        bounds: Layer -> C_l in units of `clip_norm`; equal ones, 1 / sqrt(#layers), if None.

    Raises:
        ValueError: If the bounds do not name the model's layers, or do not add up.
    """

    clip_norm: float
    bounds: Mapping[str, float] | None = None

    def factors(self, squares: Tensors) -> Tensors:
        bounds = self.resolve_bounds(tuple(squares))
        factors: Tensors = {}
        for layer, bound in bounds.items():
            part = {k: s for k, s in squares.items() if layer_of(k) == layer}
            factors.update(Flat(bound * self.clip_norm).factors(part))
        return factors

    def resolve_bounds(self, names: Sequence[str]) -> Mapping[str, float]:
        """Compute C_l / C by layer of a model with parameters `names`."""
        layers = list(dict.fromkeys(map(layer_of, names)))
        if self.bounds is None:
            return dict.fromkeys(layers, 1 / sqrt(len(layers)))
        if set(self.bounds) != set(layers):
            raise ValueError(
                f"bounds are given for {', '.join(map(repr, self.bounds))}, and the layers of this "
                f"model are {', '.join(map(repr, layers))}. Give one bound for each"
            )
        total = sum(bound**2 for bound in self.bounds.values())
        if not isclose(total, 1, rel_tol=1e-3):
            right = ", ".join(f"{k}: {v / sqrt(total):.4g}" for k, v in self.bounds.items())
            raise ValueError(
                f"the squares of the bounds sum to {total:.4g}, and must sum to 1: they are shares "
                f"of clip_norm. In the same proportions: {{{right}}}"
            )
        return {k: v / sqrt(total) for k, v in self.bounds.items()}


@dataclass(frozen=True)
class Quantile:
    """Flat clipping whose norm follows a quantile of the gradients' norms (Andrew et al. 2021).

        u_i = ( clip_c(a_i),  2 sqrt(s) C (1[|a_i| <= c] - 1/2) ),      c = sqrt(1-s) C
        c <- c exp(-rate (noisy share inside - quantile)),   kept in [1e-6, 1e6]

    An indicator of lying inside is one more coordinate of the gradient, of size sqrt(s) C, so the
    whole has norm at most C and one release pays for both. The paper's two noises are
    sigma_r = sigma / sqrt(1-s) in units of c and a standard deviation sigma / (2 sqrt(s)) on
    the count: 1/sigma^2 = 1/sigma_r^2 + 1/(2 sigma_b)^2 (arXiv:1905.03871, Theorem 1).

    Attributes:
        bound: c, the clip norm of this step, in gradient units.
        share: s, of the step's privacy cost that the count takes, in (0, 1).
        quantile: The share of examples to lie inside.
        rate: How fast c follows, per step.
    """

    bound: float
    share: float
    quantile: float
    rate: float

    @property
    def clip_norm(self) -> float:
        return self.bound / sqrt(1 - self.share)

    def factors(self, squares: Tensors) -> Tensors:
        return Flat(self.bound).factors(squares)

    def count(self, squares: Tensors, present_B: Tensor) -> Tensor:
        """Sum the extra coordinate over the examples present; a scalar."""
        import torch

        side_B = (_norm(squares) <= self.bound).to(next(iter(squares.values())).dtype) - 0.5
        return 2 * sqrt(self.share) * self.clip_norm * torch.where(present_B, side_B, 0).sum()

    def update_bound(self, released: Tensor, batch_size: int) -> float:
        """Compute the next step's c from the released extra coordinate, divided by `batch_size`."""
        inside = 0.5 + float(released) / (2 * sqrt(self.share) * self.clip_norm)
        inside = min(max(inside, 0.0), 1.0)  # noise may push it outside; public either way
        moved = self.bound * exp(-self.rate * (inside - self.quantile))
        return min(max(moved, LEAST_NORM), MOST_NORM)


def clipped_sum(gradients: PerExample, clip: Clip, present_B: Tensor | None = None) -> Clipped:
    """Sum factor_i u_i over the B examples of `gradients`; zeros of the right shape if B = 0.

    Rows where `present_B` is False only fill up a microbatch, and add nothing.
    """
    squares = {k: squared_norms(g) for k, g in gradients.items()}
    factors, count = compute_factors(squares, clip, present_B)
    total = {k: weighted_sum(factors[k], g) for k, g in gradients.items()}
    return Clipped(total | count)


def squared_norms(leaf_B: Tensor) -> Tensor:
    """|leaf_b|^2 of each example, shape (B,)."""
    return _flatten_rows(leaf_B).square().sum(1)


def weighted_sum(factor_B: Tensor, leaf_B: Tensor, finite: bool = False) -> Tensor:
    """sum_b factor_b leaf_b; a leaf whose factor is 0 may hold anything, NaN included.

    Args:
        factor_B: Shape (B,).
        leaf_B: Shape (B, ...).
        finite: True if all of `leaf_B` is known to be finite.
    """
    leaves = leaf_B if finite else zero_excluded(leaf_B, factor_B)
    factors_B1 = factor_B.to(leaf_B)[:, None]
    return summed_products(factors_B1, _flatten_rows(leaves)).view(leaf_B.shape[1:])


def _flatten_rows(leaf_B: Tensor) -> Tensor:
    """Shape (B, X)."""
    return leaf_B.flatten(1) if leaf_B.dim() > 1 else leaf_B[:, None]


def summed_products(
    left_BM: Tensor, right_BN: Tensor, num_positions: int = 1, num_together: int = SUMMED
) -> Tensor:
    """sum_b l_b r_b^T over B examples, shape (..., M, N); in double over sums of `num_together`.

    All sums of so many examples are one product: the number of kernels does not grow with B.

    Args:
        left_BM: Shape (..., B * num_positions, M).
        right_BN: Shape (..., B * num_positions, N).
        num_positions: Rows of each example.
        num_together: Examples of one sum.
    """
    import torch

    rows = left_BM.shape[-2]
    each = num_together * num_positions
    whole = rows // each * each
    if rows <= each:
        return left_BM.mT @ right_BN
    left, right = (
        x[..., :whole, :].reshape(*x.shape[:-2], -1, each, x.shape[-1]) for x in (left_BM, right_BN)
    )
    double = torch.complex128 if left_BM.is_complex() else torch.float64
    sums = (left.mT @ right).sum(-3, dtype=double)
    if whole < rows:
        sums += left_BM[..., whole:, :].mT @ right_BN[..., whole:, :]
    return sums


def zero_excluded(leaf_B: Tensor, factor_B: Tensor, dim: int = 0) -> Tensor:
    """Replace the rows of examples with factor 0 by zeros, since 0 * NaN is NaN.

    Args:
        leaf_B: Shape (B, ...), or B at `dim`.
        factor_B: Shape (B,).
        dim: Axis of the examples.
    """
    # elsewhere than on a CPU, asking would wait for the device; a sum may overflow without harm
    if leaf_B.is_cpu and cmath.isfinite(leaf_B.sum().item()):
        return leaf_B
    return keep_rows(factor_B != 0, leaf_B, dim)


def keep_rows(kept_B: Tensor, leaf_B: Tensor, dim: int = 0) -> Tensor:
    """`leaf_B` with zeros for the other examples; B is at `dim`."""
    import torch

    rows = kept_B.view(-1, *(1,) * (leaf_B.dim() - dim - 1))
    return torch.where(rows, leaf_B, zero(leaf_B.dtype, leaf_B.device))


@lru_cache(maxsize=16)
def zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zero, made once: torch.where(..., 0) makes one on the device each time."""
    import torch

    return torch.zeros((), dtype=dtype, device=device)


def stack_squares(squares: Tensors) -> tuple[Tensor, Tensor]:
    """Stack squared norms, shape (P, B), float64; find the examples that can be clipped."""
    import torch

    leaves = list(squares.values())
    if leaves[0].is_cuda:
        leaves = convert(leaves, torch.float64)  # by few kernels; on a CPU stacking converts
    parts_PB = torch.stack(leaves).double()
    return parts_PB, parts_PB.sum(0) <= LARGEST_SQUARE  # false for NaN


def compute_factors(
    squares: Tensors,
    clip: Clip,
    present_B: Tensor | None = None,
    stacked: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensors, Tensors]:
    """Compute each parameter's factors, shape (B,), and the sum of the extra coordinate, if any.

    The factors of a gradient whose norm is not finite, or above 1e18, are zero in every parameter:
    float32 has no factor that would bring a larger one down to the clip norm.

    Args:
        squares: Parameter name -> squared L2 norm of its part of each gradient, shape (B,).
        clip: The style.
        present_B: False for rows that only fill up a microbatch; all are there if None.
        stacked: Of `stack_squares`, if that is known.
    """
    import torch

    parts_PB, usable_B = stacked or stack_squares(squares)
    if present_B is None:
        present_B = torch.ones_like(usable_B)
    usable_B = usable_B & present_B
    squares = dict(zip(squares, keep_rows(usable_B, parts_PB, dim=1), strict=True))
    found = clip.factors(squares)
    distinct = {id(f): f for f in found.values()}  # flat clipping has one for all parameters
    kept = {i: keep_rows(usable_B, f) for i, f in distinct.items()}
    factors = {k: kept[id(f)] for k, f in found.items()}
    return factors, {INSIDE: clip.count(squares, present_B)} if isinstance(clip, Quantile) else {}


def add_clipped(total: Clipped, part: Clipped) -> Clipped:
    """Add the sum over another batch with no example in common to `total`, in place.

    A total in double stays in double.

    Microbatches are summed in double precision: one example more moves the bounds of all those
    after it, and the others' rounding errors with them.
    """
    import torch

    parts = [part[k] for k in total]
    if any(leaf.is_cuda for leaf in parts):  # by few kernels
        parts = convert((leaf.contiguous() for leaf in parts), torch.float64)
    torch._foreach_add_(list(total.values()), parts)
    return total


def stack_parts(here: Clipped, there: Clipped, own: float, other: float) -> Clipped:
    """Stack own * here and other * (there - here), under the names 0/NAME and 1/NAME.

    With both sums clipped to C, one example moves it by at most C sqrt(own^2 + 4 other^2).
    """
    first = {f"0/{k}": own * leaf for k, leaf in here.items()}
    second = {f"1/{k}": other * (there[k] - leaf) for k, leaf in here.items()}
    return Clipped(first | second)


def split_count(released: Released) -> tuple[Released, Tensor | None]:
    """Split a release into gradients and the count of `Quantile`; None without a count."""
    rest = Released({k: leaf for k, leaf in released.items() if k != INSIDE})
    return rest, released.get(INSIDE)


def layer_of(name: str) -> str:
    """Return the name of the module that owns a parameter.

    >>> layer_of("blocks.0.conv.weight")
    'blocks.0.conv'
    """
    return name.rpartition(".")[0]


def _norm(squares: Tensors) -> Tensor:
    """Norm of each whole gradient, shape (B,)."""
    import torch

    return torch.stack(list(squares.values())).sum(0).sqrt()
