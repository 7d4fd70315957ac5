"""Convolutions whose kernels are standardised before they are used.

Qiao et al. 2019, arXiv:1903.10520, scaled as in Brock et al. 2021, arXiv:2101.08692, so that
inputs of variance 1 give outputs of variance 1. De et al. 2022, arXiv:2204.13650, find it worth
some points under privacy: with group norm, kernels' means and sizes change nothing but the noise.
"""

from math import prod

import torch
from torch import Tensor, nn

_EPS = 1e-4


def standardize_weight(weight: Tensor) -> Tensor:
    """Shift and scale each filter to mean 0 and variance 1 / n, n its number of entries.

    w^_o = (w_o - mean(w_o)) / sqrt(n var(w_o) + 1e-4)

    Args:
        weight: Shape (O, ...).
    """
    axes = tuple(range(1, weight.dim()))
    variance, mean = torch.var_mean(weight, axes, correction=0, keepdim=True)
    standard: Tensor = (weight - mean) / (prod(weight.shape[1:]) * variance + _EPS).sqrt()
    return standard


class StandardConv2d(nn.Conv2d):
    """A convolution with `standardize_weight(weight)` for its kernel.

    It learns the weight before that. Its gradients are the kernel's, led back through a map of
    public weights (privacy/engine/layers.py).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W) -> (B, out_channels, H', W')."""
        y: Tensor = self._conv_forward(x, standardize_weight(self.weight), self.bias)
        return y
