"""A linear layer of circulant blocks: far fewer weights, and a spectrum for each block.

Spectral-DP filters a weight gradient across its frequencies. The weights of a dense layer
have no order that frequencies could refer to; the generator of a circulant block has one.
Read privacy/spectral.py next.
"""

from math import gcd, sqrt

import torch
from torch import Tensor, nn


class CirculantLinear(nn.Module):
    """A linear map whose matrix is a grid of p x q circulant d x d blocks.

        y_i = sum_j circ(w_ij) x_j + b_i,     (circ(w) x)[s] = sum_r w[(s - r) mod d] x[r]

    x_j and y_i are the j-th and i-th run of d features, p = out_features / d and
    q = in_features / d. The generator w_ij is the first column of its block; the paper names
    a block by its first row, the same entries in mirrored order. Each block is a circular
    convolution, computed by FFT, and costs d weights where a dense one has d^2.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        block: d, a divisor of both. 1 is a dense layer.
        bias: Whether to add one learned number per output.

    Attributes:
        weight: The generators, shape (p, q, d).

    Raises:
        ValueError: If `block` does not divide both sizes.

    Source: Feng et al. 2023, Spectral-DP, section 3.3.1; Ding et al. 2017, CirCNN,
    arXiv:1708.08917.

    >>> sum(p.numel() for p in CirculantLinear(64, 32, block=8).parameters())  # dense: 2080
    288
    """

    bias: nn.Parameter | None  # shape (out_features,), or None

    def __init__(self, in_features: int, out_features: int, block: int, bias: bool = True) -> None:
        super().__init__()
        common = gcd(in_features, out_features)
        if block < 1 or common % block:
            fitting = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
            raise ValueError(
                f"CirculantLinear.block must divide both in_features = {in_features} and "
                f"out_features = {out_features}, got {block}. Blocks that fit: {fitting}."
            )
        self.in_features, self.out_features, self.block = in_features, out_features, block
        shape = (out_features // block, in_features // block, block)
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw as nn.Linear does: the output of either layer then has the same variance."""
        bound = 1 / sqrt(self.in_features)
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (..., in_features) to outputs (..., out_features), for any leading axes."""
        blocks = x.reshape(*x.shape[:-1], self.in_features // self.block, self.block)
        spectrum = torch.einsum(
            "pqf,...qf->...pf", torch.fft.rfft(self.weight), torch.fft.rfft(blocks)
        )
        y: Tensor = torch.fft.irfft(spectrum, n=self.block).flatten(-2)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """The constructor's arguments, as nn.Linear prints them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"block={self.block}, bias={self.bias is not None}"
        )
