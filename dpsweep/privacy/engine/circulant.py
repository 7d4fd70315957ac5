"""Circulant blocks: norms and sums of the generators' gradients from spectra, never written out.

    R_ij[l] = sum_t sum_s g_i[s] x_j[(s - l) mod d],     R^_ij(f) = sum_t g^_i(f) conj(x^_j(f))

over the positions t of a sequence. At each frequency that is the gradient of a linear layer, so
by Parseval the norm is a sum over frequencies of what Gram matrices say of such a layer, and the
clipped sum one matrix product a frequency, transformed back at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

import torch
from torch import Tensor

from dpsweep.core.circulant import CirculantLinear
from dpsweep.privacy.clip import SUMMED, summed_products, zero_excluded
from dpsweep.privacy.engine.gradients import (
    NOTHING,
    Known,
    Rows,
    add_rounding_bound,
    mark_too_long,
    num_together,
    sum_that_may_cancel,
    take_examples,
)
from dpsweep.privacy.engine.records import LayerCall


@dataclass(frozen=True, eq=False)
class CirculantGradients:
    """Gradients of a layer's generators.

    Norm and sum are made of the very same spectra: what a transform rounds is in both.

    Attributes:
        block: d.
        inputs_FBTq: x^, at the F = d // 2 + 1 real frequencies, complex.
        grads_FBTp: g^, weights of the query included, complex.
    """

    block: int
    inputs_FBTq: Tensor
    grads_FBTp: Tensor

    @property
    def may_cancel(self) -> bool:
        """True if terms may cancel, as in gradients.OuterProducts."""
        return self.inputs_FBTq.shape[2] > 1 and self.grads_FBTp.dtype != torch.complex128

    @classmethod
    def of(cls, layer: CirculantLinear, calls: Sequence[LayerCall]) -> Self:
        """Collect the spectra of a layer's calls, side by side."""
        d = layer.block
        inputs = [_compute_spectra(call.inputs[0], d) for call in calls]
        grads = [_compute_spectra(call.weighted(call.grad), d) for call in calls]
        return cls(d, torch.cat(inputs, 2), torch.cat(grads, 2))

    @property
    def ghost_norm_is_cheaper(self) -> bool:
        """True if Gram matrices cost less than the gradients written out, as for OuterProducts."""
        _, _, length, q = self.inputs_FBTq.shape
        p = self.grads_FBTp.shape[3]
        grams = 2 * length**2 * (q + p) + length * q * p
        return length == 1 or grams < 1.5 * length * q * p + 8 * q * p

    def squares(self) -> Tensor:
        return self.norms[0]

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Squares, and the norm that there would be if nothing cancelled, shape (B,) each."""
        x, g = self.inputs_FBTq, self.grads_FBTp
        bins_F = _count_bins(self.block, x.device) / self.block
        each_FBT = mark_too_long(_compute_power(x)) * mark_too_long(_compute_power(g))
        square_BT = torch.tensordot(each_FBT, bins_F, ([0], [0]))
        longest_B = square_BT.sqrt().sum(1)
        if x.shape[2] == 1:
            return square_BT[:, 0], longest_B
        square_B = bins_F @ (_compute_gram(g) * _compute_gram(x).conj()).real.sum((2, 3))
        return add_rounding_bound(square_B, longest_B, g.real.dtype, x.shape[2]), longest_B

    def sum_scaled(self, factor_B: Tensor, known: Known = NOTHING) -> Tensor:
        x, g = self.inputs_FBTq, self.grads_FBTp
        if not known.finite:
            x, g = _zero_excluded(x, factor_B), _zero_excluded(g, factor_B)

        def products(rows: Rows, factor_B: Tensor, dtype: torch.dtype) -> Tensor:
            some, these = (
                take_examples(leaf, rows, dim=1).to(dtype.to_complex()) for leaf in (x, g)
            )
            scaled = (these * factor_B.to(dtype)[:, None, None]).flatten(1, 2)
            length = x.shape[2]
            each = num_together(length) if self.may_cancel else SUMMED
            return self._back(summed_products(scaled, some.flatten(1, 2).conj(), length, each))

        if not self.may_cancel:
            return products(None, factor_B, g.real.dtype)
        return sum_that_may_cancel(products, factor_B, self.norms, known, g.real.dtype)

    def each(self) -> Tensor:
        return self._back(self.grads_FBTp.transpose(2, 3) @ self.inputs_FBTq.conj())

    def _back(self, spectrum: Tensor) -> Tensor:
        """(F, ..., p, q) -> (..., p, q, d)."""
        last = spectrum.movedim(0, -1).contiguous()
        generators: Tensor = torch.fft.irfft(last, n=self.block)
        return generators


def _compute_spectra(leaf: Tensor, block: int) -> Tensor:
    """(B, ..., features) -> (F, B, T, blocks), as products over blocks want them."""
    blocks = leaf.reshape(len(leaf), -1, leaf.shape[-1] // block, block)
    spectra: Tensor = torch.fft.rfft(blocks)
    return spectra.movedim(-1, 0).contiguous()


@lru_cache(maxsize=64)
def _count_bins(n: int, device: torch.device) -> Tensor:
    """Count the bins, of n, that each real frequency stands for: 2, but 1 for zero and Nyquist."""
    bins_F = torch.full((n // 2 + 1,), 2.0, dtype=torch.float64)
    bins_F[0] = 1
    if n % 2 == 0:
        bins_F[-1] = 1
    return bins_F.to(device)


def _compute_power(spectra: Tensor) -> Tensor:
    """|.|^2 over blocks, shape (F, B, T), float64."""
    return torch.view_as_real(spectra).flatten(-2).double().square().sum(-1)


def _compute_gram(spectra: Tensor) -> Tensor:
    """<z_t, z_t'> over blocks, shape (F, B, T, T), complex128."""
    exact = spectra.to(torch.complex128)
    return exact @ exact.mH.resolve_conj()


def _zero_excluded(spectra: Tensor, factor_B: Tensor) -> Tensor:
    return torch.view_as_complex(zero_excluded(torch.view_as_real(spectra), factor_B, dim=1))
