"""The weight gradient of a convolution, by torch's own kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor


def kernel_gradient(
    inputs: Tensor,
    grads: Tensor,
    shape: Sequence[int],
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """d/dK of sum(grads * conv2d(inputs, K)).

    Args:
        inputs: Shape (B, I, H, W).
        grads: Shape (B, O, H', W').
        shape: Of K, (O, I / groups, k_h, k_w).
        padding: Zeros on both sides, by axis.
    """
    only_weight = (False, True, False)
    _, by_weight, _ = torch.ops.aten.convolution_backward(
        grads,
        inputs,
        grads.new_empty(tuple(shape)),  # read for its shape alone
        None,
        stride,
        padding,
        dilation,
        False,
        (0, 0),
        groups,
        only_weight,
    )
    found: Tensor = by_weight
    return found
