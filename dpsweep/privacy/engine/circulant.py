"""Circulant blocks: per-example gradients of the generators stay spectra.

    R_ij[l] = sum_t sum_s g_i[s] x_j[(s - l) mod d],     R^_ij(f) = sum_t g^_i(f) conj(x^_j(f))

over the positions t of a sequence. By Parseval the norm is a sum over frequencies, and only the
clipped sum is transformed back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dpsweep.core.circulant import CirculantLinear
from dpsweep.privacy.clip import cleaned
from dpsweep.privacy.engine.tape import Use


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Real spectra of the answers, shape (B, p, q, d // 2 + 1), complex.

    Attributes:
        block: d.
        spectrum_BpqF: The spectra.
    """

    block: int
    spectrum_BpqF: Tensor

    @classmethod
    def of(cls, layer: CirculantLinear, uses: Sequence[Use]) -> Self:
        """Those of a layer's generators."""
        d, total = layer.block, None
        for use in uses:
            num = len(use.grad)
            g = torch.fft.rfft((use.weight * use.grad).reshape(num, -1, layer.out_features // d, d))
            x = torch.fft.rfft(use.inputs[0].reshape(num, -1, layer.in_features // d, d))
            part = torch.einsum("btpf,btqf->bpqf", g, x.conj())
            total = part if total is None else total + part
        assert total is not None
        return cls(d, total)

    def squares(self) -> Tensor:
        bins_F = torch.full((self.block // 2 + 1,), 2.0, device=self.spectrum_BpqF.device)
        bins_F[0] = 1  # zero is one bin, and so is Nyquist; all others are pairs
        if self.block % 2 == 0:
            bins_F[-1] = 1
        energy = torch.view_as_real(self.spectrum_BpqF).square().sum(-1)
        return (energy.sum((1, 2)) @ bins_F.to(energy)) / self.block

    def summed(self, factor_B: Tensor) -> Tensor:
        spectrum = cleaned(torch.view_as_real(self.spectrum_BpqF), factor_B)
        total = torch.tensordot(factor_B.to(spectrum), spectrum, dims=1)
        generators: Tensor = torch.fft.irfft(torch.view_as_complex(total), n=self.block)
        return generators

    def each(self) -> Tensor:
        generators_B: Tensor = torch.fft.irfft(self.spectrum_BpqF, n=self.block)
        return generators_B
