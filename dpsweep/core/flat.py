"""Many tensors in one piece of memory: on a GPU every operation on every tensor is a launch.

Leaves that lie in one flat tensor are copied, converted or compared by one kernel each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def make_zeros(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Zeros of each shape, as views of one tensor."""
    import torch

    sizes = [prod(shape) for shape in shapes]
    parts = torch.split(torch.zeros(sum(sizes), dtype=dtype, device=device), sizes)
    return [x.view(tuple(shape)) for x, shape in zip(parts, shapes, strict=True)]


def copy_flat(
    leaves: Iterable[Tensor], dtype: torch.dtype | None = None, device: torch.device | None = None
) -> list[Tensor]:
    """Copies of tensors of one device, all of one precision as views of one tensor.

    Args:
        leaves: The tensors. Copies are laid out as they are, where these have no gaps.
        dtype: Of the copies; as they are if None.
    """
    import torch

    leaves = list(leaves)
    groups: dict[torch.dtype, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(i)
    copies = list(leaves)
    for own, numbers in groups.items():
        lines = [in_memory_order(leaves[i]) for i in numbers]
        flat = torch.cat([line.detach() for line, _ in lines])
        flat = flat.to(device or flat.device, dtype or own, non_blocking=True)
        parts = torch.split(flat, [leaves[i].numel() for i in numbers])
        for i, part, (_, stride) in zip(numbers, parts, lines, strict=True):
            copies[i] = part.as_strided(leaves[i].shape, stride)
    return copies


def convert(leaves: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Tensors in another precision; on a GPU by few kernels."""
    leaves = list(leaves)
    others = [x for x in leaves if x.dtype != dtype]
    if len(others) < 2 or not others[0].is_cuda:
        return [x.to(dtype) for x in leaves]
    made = iter(copy_flat(others, dtype))
    return [x if x.dtype == dtype else next(made) for x in leaves]


def in_memory_order(leaf: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The numbers of a tensor in a line, without a copy if it has no gaps, and the line's strides.

    >>> import torch
    >>> in_memory_order(torch.tensor([[1, 2], [3, 4]]).T)
    (tensor([1, 2, 3, 4]), (1, 2))
    """
    order = sorted(range(leaf.dim()), key=lambda d: (leaf.stride(d), leaf.shape[d]), reverse=True)
    turned = leaf.permute(order)
    if turned.is_contiguous():
        return turned.reshape(-1), leaf.stride()
    flat = leaf.contiguous()
    return flat.view(-1), flat.stride()
