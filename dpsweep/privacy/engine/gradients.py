"""Per-example gradients of one parameter, each in the form that is cheapest for its layer.

A form computes each example's squared norm, then takes the clipping factors and computes the
clipped sum. Only `WrittenOut` holds per-example gradients; the others compute both from records.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from dpsweep.privacy.clip import (
    LARGEST_SQUARE,
    SUMMED,
    squared_norms,
    summed_products,
    weighted_sum,
    zero,
    zero_excluded,
)

_SLACK, _TERMS = 16, 64
"""Rounding errors to allow for, in units of the precision: of a sum, and of all the products in a
Gram matrix."""

_CHUNK = 64
"""Numbers whose squares are summed in their own precision."""

_CANCELLATION = 64.0
"""Times the largest clipped gradient: an example whose terms are larger is summed in double. With
ordinary data and models the factor is 1 to 20, and no example is."""

_ADDED, _TOGETHER = 1280, 8
"""Terms that one sum in float32 adds where they may cancel, and the fewest examples of it; such
sums are added in double."""


@dataclass(frozen=True)
class Known:
    """Facts about all examples that are known before they are summed.

    Attributes:
        finite: True if every number that their sums read is finite.
        quiet: True if none is to be summed in double precision.
    """

    finite: bool = False
    quiet: bool = False


NOTHING = Known()
"""Nothing known: the sum must look, for which a GPU would be waited for."""


class ParameterGradients(Protocol):
    """Gradients of B examples for one parameter. Private.

    An example of factor 0 leaves no trace in the sum, not even of a NaN.
    """

    def squares(self) -> Tensor:
        """Squared norm of each example's gradient, shape (B,); NaN or infinite if it is."""

    def sum_scaled(self, factor_B: Tensor, known: Known = NOTHING) -> Tensor:
        """Sum factor_b gradient_b over examples; its own shape, or whitened coordinates."""

    def each(self) -> Tensor:
        """Write the gradients out, shape (B, *param.shape)."""


@dataclass(frozen=True, eq=False)
class WrittenOut:
    """Gradients written out, shape (B, *param.shape)."""

    leaf_B: Tensor

    def squares(self) -> Tensor:
        return squared_norms(self.leaf_B)

    def sum_scaled(self, factor_B: Tensor, known: Known = NOTHING) -> Tensor:
        return weighted_sum(factor_B, self.leaf_B, known.finite)

    def each(self) -> Tensor:
        return self.leaf_B


@dataclass(frozen=True, eq=False)
class OuterProducts:
    """sum_t g_t a_t^T over the T positions of a linear layer, never written out.

    With A = (a_1 ... a_T) and G likewise, |G A^T|^2 = sum of (A^T A) o (G^T G).

    Attributes:
        inputs_BTI: a, shape (B, T, I).
        grads_BTO: g, weights of the query included, shape (B, T, O).
    """

    inputs_BTI: Tensor
    grads_BTO: Tensor

    @property
    def may_cancel(self) -> bool:
        """True if an example's terms, at positions or points of a query, may cancel one another."""
        return self.inputs_BTI.shape[1] > 1 and self.grads_BTO.dtype != torch.float64

    @property
    def ghost_norm_is_cheaper(self) -> bool:
        """True if two Gram matrices cost less than the gradients written out."""
        _, length, width = self.inputs_BTI.shape
        size = width * self.grads_BTO.shape[2]
        grams = 2 * length**2 * (width + self.grads_BTO.shape[2]) + length * size
        return length == 1 or grams < 1.5 * length * size + 8 * size

    def squares(self) -> Tensor:
        a, g = self.inputs_BTI, self.grads_BTO
        if a.shape[1] == 1:  # one position cannot cancel: |g a^T| = |g| |a|, without a Gram matrix
            lengths = square_norms(a[:, 0]), square_norms(g[:, 0])
            longest_B = torch.maximum(*lengths)
            return torch.mul(*lengths).masked_fill(longest_B > LARGEST_SQUARE, math.inf)
        return self.norms[0]

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Squares, and the norm that there would be if nothing cancelled, shape (B,) each."""
        a, g = self.inputs_BTI, self.grads_BTO
        return square_norms_from_grams(compute_gram(a), compute_gram(g), g.dtype)

    def sum_scaled(self, factor_B: Tensor, known: Known = NOTHING) -> Tensor:
        return self.summed_as_part(factor_B, known)

    def summed_as_part(
        self, factor_B: Tensor, known: Known, norms: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """`summed`, of gradients that are a part of others, whose `norms` say what may cancel."""
        a, g = self.inputs_BTI, self.grads_BTO
        if not known.finite:
            a, g = zero_excluded(a, factor_B), zero_excluded(g, factor_B)
        length = a.shape[1]

        def products(rows: Rows, factor_B: Tensor, dtype: torch.dtype) -> Tensor:
            left, right = take_examples(g, rows).to(dtype), take_examples(a, rows).to(dtype)
            scaled = (left * factor_B.to(dtype).view(-1, 1, 1)).flatten(0, 1)
            each = num_together(length) if self.may_cancel else SUMMED
            return summed_products(scaled, right.flatten(0, 1), length, each)

        if not self.may_cancel and norms is None:
            return products(None, factor_B, g.dtype)
        return sum_that_may_cancel(products, factor_B, norms or self.norms, known, g.dtype)

    def each(self) -> Tensor:
        return self.grads_BTO.transpose(1, 2) @ self.inputs_BTI


@dataclass(frozen=True, eq=False)
class EmbeddingRows:
    """Gradients of an embedding's rows: sum over positions of g_t in row i_t.

    Attributes:
        rows_BT: i, int64, shape (B, T).
        grads_BTE: g, weights of the query included; zero at padding. Shape (B, T, E).
        num_rows: Rows of the table.
    """

    rows_BT: Tensor
    grads_BTE: Tensor
    num_rows: int

    def squares(self) -> Tensor:
        same = self.rows_BT[:, :, None] == self.rows_BT[:, None, :]
        return square_norms_from_grams(
            same.double(), compute_gram(self.grads_BTE), self.grads_BTE.dtype
        )[0]

    def sum_scaled(self, factor_B: Tensor, known: Known = NOTHING) -> Tensor:
        g = self.grads_BTE if known.finite else zero_excluded(self.grads_BTE, factor_B)
        g = g.double()  # positions in one row may cancel
        scaled = (g * factor_B.to(g)[:, None, None]).flatten(0, 1)
        num, slices = self.num_rows, -(-len(g) // SUMMED)
        rows_BT = self.rows_BT
        if slices > 1:  # a table for each, side by side
            rows_BT = rows_BT + num * (torch.arange(len(g), device=g.device) // SUMMED)[:, None]
        tables = _add_rows(slices * num, rows_BT.flatten(), scaled)
        return tables if slices < 2 else tables.view(slices, num, -1).sum(0, dtype=torch.float64)

    def each(self) -> Tensor:
        g, num = self.grads_BTE, self.num_rows
        first_B = torch.arange(0, len(g) * num, num, device=g.device)
        rows = (first_B[:, None] + self.rows_BT).flatten()
        return _add_rows(len(g) * num, rows, g.flatten(0, 1)).view(len(g), num, -1)


@dataclass(frozen=True, eq=False)
class TiedRows:
    """Gradients of a table of words that is also the output layer, as in most language models.

    With rows i_t and gradients g_t of the table, and inputs a_s and output gradients h_s of the
    layer, |E + O|^2 = |E|^2 + |O|^2 + 2 sum_st h_s[i_t] <a_s, g_t>: both parts count, together.

    Attributes:
        rows: E, of the table.
        outer: O, of the output layer.
    """

    rows: EmbeddingRows
    outer: OuterProducts

    @property
    def may_cancel(self) -> bool:
        """True if terms may cancel: those of the two parts always may."""
        return self.outer.grads_BTO.dtype != torch.float64

    def squares(self) -> Tensor:
        return self.norms[0]

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Squares, and the norm that there would be if nothing cancelled, shape (B,) each."""
        i_BT, g = self.rows.rows_BT, self.rows.grads_BTE
        a, h = self.outer.inputs_BTI, self.outer.grads_BTO
        same = (i_BT[:, :, None] == i_BT[:, None, :]).double()
        table_B, long_B = multiply_grams(same, compute_gram(g))
        layer_B, longer_B = multiply_grams(compute_gram(a), compute_gram(h))
        h_BST = h.gather(2, i_BT[:, None, :].expand(-1, h.shape[1], -1)).double()
        both_B = (h_BST * (a.double() @ g.double().transpose(1, 2))).sum((1, 2))
        square_B, longest_B = table_B + layer_B + 2 * both_B, long_B + longer_B
        num = i_BT.shape[1] + h.shape[1]
        return add_rounding_bound(square_B, longest_B, h.dtype, num), longest_B

    def sum_scaled(self, factor_B: Tensor, known: Known = NOTHING) -> Tensor:
        layer = self.outer.summed_as_part(factor_B, known, self.norms if self.may_cancel else None)
        return self.rows.sum_scaled(factor_B, known) + layer

    def each(self) -> Tensor:
        return self.rows.each() + self.outer.each()


def _add_rows(num_rows: int, rows_N: Tensor, values_NE: Tensor) -> Tensor:
    """Sum of the values that go to each row, shape (num_rows, E), added in one order."""
    table = values_NE.new_zeros(num_rows, values_NE.shape[-1])
    if table.is_cuda:  # index_add adds there in any order; index_put sorts the rows first
        return table.index_put_((rows_N,), values_NE, accumulate=True)
    return table.index_add_(0, rows_N, values_NE)


def add_shared(gradients: Sequence[ParameterGradients]) -> ParameterGradients:
    """Add the gradients of a parameter that several layers share."""
    match gradients:
        case [one]:
            return one
        case [EmbeddingRows() as rows, OuterProducts() as outer]:
            return TiedRows(rows, outer)
    return WrittenOut(torch.stack([gradient.each() for gradient in gradients]).sum(0))


def square_norms(leaf_BX: Tensor) -> Tensor:
    """Compute |x_b|^2, shape (B,), float64; of float32 never too small, too large by 1e-5 of it.

    Norms of a few numbers each, in their own precision, whose squares add up in double: no copy
    of all of them in double is made. What may be lost in them is added: a rounding error for each
    number, and squares too small for the precision.
    """
    if leaf_BX.dtype == torch.float64:
        return leaf_BX.square().sum(1)
    limits, num = torch.finfo(leaf_BX.dtype), leaf_BX.shape[1]
    if num <= _CHUNK:
        square_B: Tensor = torch.linalg.vector_norm(leaf_BX, dim=1).double().square()
    else:
        whole = num // _CHUNK * _CHUNK
        runs = [leaf_BX[:, :whole].view(len(leaf_BX), whole // _CHUNK, _CHUNK)]
        if whole < num:
            runs.append(leaf_BX[:, None, whole:])
        norms_BR = torch.cat([torch.linalg.vector_norm(run, dim=2) for run in runs], 1)
        square_B = norms_BR.double().square().sum(1)
    return square_B * (1 + (_CHUNK + 4) * limits.eps) + num * limits.tiny


def compute_gram(leaf_BTX: Tensor) -> Tensor:
    """Compute <x_t, x_t'> for each example, shape (B, T, T), float64."""
    leaf = leaf_BTX.double()
    return torch.bmm(leaf, leaf.transpose(1, 2))


def square_norms_from_grams(
    left_BTT: Tensor, right_BTT: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """|sum_t l_t r_t^T|^2 from both Gram matrices, and sum_t |l_t| |r_t|; shape (B,), float64.

    The products may cancel; see `add_rounding_bound`.
    """
    square_B, longest_B = multiply_grams(left_BTT, right_BTT)
    return add_rounding_bound(square_B, longest_B, dtype, left_BTT.shape[1]), longest_B


def multiply_grams(left_BTT: Tensor, right_BTT: Tensor) -> tuple[Tensor, Tensor]:
    """|sum_t l_t r_t^T|^2 as it is computed, and sum_t |l_t| |r_t|; shape (B,), float64."""
    return (left_BTT * right_BTT).sum((1, 2)), sum_lengths(left_BTT, right_BTT)


def sum_lengths(left_BTT: Tensor, right_BTT: Tensor) -> Tensor:
    """sum_t |l_t| |r_t|, shape (B,), from both Gram matrices; not finite where one is too long."""
    return (mark_too_long(diagonal(left_BTT)) * mark_too_long(diagonal(right_BTT))).sqrt().sum(1)


def mark_too_long(squares: Tensor) -> Tensor:
    """Squared norms of one factor of a product; infinite, and the example out, above 1e36.

    A gradient of 1e38 times an input of 1e-40 is small, and so is one of 1e-22 times 1e38. But the
    clipping factor times the gradient would be infinite (automatic clipping has factors above 1),
    or so small that float32 has few bits for it, which the input then makes large.
    """
    return squares.masked_fill(squares > LARGEST_SQUARE, math.inf)


def add_rounding_bound(
    square_B: Tensor, longest_B: Tensor, dtype: torch.dtype, num_positions: int
) -> Tensor:
    """Add to a squared norm, summed in double from terms of both signs, what rounding may hide.

    An example whose positions cancel one another must not be let through with a norm too small
    for it. Hidden may be eps64 L^2 of the square itself, L = sum_t |l_t| |r_t|, and of the sum
    that is later computed in `dtype` a length of eps L.
    """
    slack = max(_SLACK, num_positions) * torch.finfo(dtype).eps
    hidden_B = (slack * longest_B).square()
    rounded_B = _TERMS * torch.finfo(torch.float64).eps * longest_B.square()
    return square_B.clamp(min=0) + hidden_B + rounded_B


Rows = Tensor | None
"""Indices of some examples; None for all."""


def take_examples(leaf_B: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    """Take some examples, which are at `dim`; all of them without a copy."""
    return leaf_B if rows is None else leaf_B.index_select(dim, rows)


def num_together(num_terms: int) -> int:
    """Number of examples to add in float32, each of so many terms, which may cancel."""
    return max(_TOGETHER, _ADDED // num_terms)


def sum_that_may_cancel(
    summed: Callable[[Rows, Tensor, torch.dtype], Tensor],
    factor_B: Tensor,
    norms: tuple[Tensor, Tensor],
    known: Known,
    dtype: torch.dtype,
) -> Tensor:
    """sum_b factor_b sum_t (term of b at t), so that no example blurs the others' low bits.

    In float32 a sum is rounded to what its largest partial sum leaves. An example's terms can be
    5e5 clip norms each and cancel; all that is added between the first and the last of them would
    lose its low bits. Such examples are summed in double, and of the others few at a time in
    float32.

    Args:
        summed: (examples, their factors, dtype) -> their sum, of `num_together` at a time.
        factor_B: Clipping factors; an example of factor 0 must hold zeros.
        norms: Squared norms of the gradients, and the norms they would have if nothing cancelled.
        known: Of the examples.
        dtype: Of the model.
    """
    if known.quiet:
        return summed(None, factor_B, dtype).double()
    cancelling_B, other_B = split_by_cancellation(factor_B, *norms)
    total = summed(None, other_B, dtype).double()
    rows = cancelling_B.nonzero().flatten()
    return total + summed(rows, cancelling_B[rows], torch.float64) if len(rows) else total


def split_by_cancellation(
    factor_B: Tensor, square_B: Tensor, longest_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Split the factors: examples whose points nearly cancel one another, and all others.

    In a float32 sum, the large terms of such an example would round the others' terms away before
    its points cancel; it is summed in double instead. Each of the two results has zeros for the
    other's examples.

    Args:
        factor_B: Clipping factors.
        square_B: Squared norms of the gradients.
        longest_B: Norms they would have if nothing cancelled.
    """
    cancelling_B = find_cancelling(factor_B, square_B, longest_B)
    nil = zero(factor_B.dtype, factor_B.device)
    return torch.where(cancelling_B, factor_B, nil), torch.where(cancelling_B, nil, factor_B)


def find_cancelling(factor_B: Tensor, square_B: Tensor, longest_B: Tensor) -> Tensor:
    """Find the examples to sum in double precision; of several layers at once, shape (L, B)."""
    usual = (factor_B * square_B.sqrt()).nan_to_num(0, 0, 0).amax(-1, keepdim=True)
    return (factor_B != 0) & ~(factor_B * longest_B <= _CANCELLATION * usual)


def any_nonzero(factor_B: Tensor) -> bool:
    """True if any factor is nonzero. On a GPU always True: asking would wait for the device."""
    return factor_B.device.type != "cpu" or bool(factor_B.any())


def diagonal(gram_BTT: Tensor) -> Tensor:
    """<x_t, x_t>, shape (B, T)."""
    return gram_BTT.diagonal(dim1=1, dim2=2)
