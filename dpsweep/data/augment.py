"""Augmentation: flips and shifted crops of each example, drawn from the example itself.

With multiplicity K an example has K copies, and the mean of their gradients is its one per-example
gradient, clipped once (De et al. 2022, arXiv:2204.13650, section 3.3). So it moves the clipped sum
by at most C, as without augmentation, and noise and accounting stay as they are.

The draws are public: copy k of example x at step t is a fixed function f(x, t, k, seed). They hang
on what the example is, by a hash of its pixels, and not on where it lies in the batch or in the
data set: with draws by place, one example more would move those after it to other draws, and
change the sum by more than its own answer. With draws by example the others' answers stay what
they were, whatever the seed and whoever knows it; nothing here must be secret, a replayed step asks
the same, and equal images get equal draws. All of it is integer arithmetic, the same on every
device.

Shapes: B examples, K copies, images of C channels and H x W pixels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import InvalidKey
from dpsweep.core.seeds import derive_public_seed
from dpsweep.core.strict import Strict

if TYPE_CHECKING:
    from torch import Tensor

_BITS = 31
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROWS = 512


class Augment(Strict):
    """Random changes of a copy, and the number of copies of an example."""

    flips: bool = False
    """True to mirror each copy left to right with probability 1/2."""

    crops: int = Field(default=0, ge=0)
    """Largest shift of a copy, in pixels, up or down and left or right; the border is filled with
    the image mirrored at its edge. Below the image's sides."""

    multiplicity: int = Field(default=1, gt=0)
    """K: copies of each example, whose mean gradient is clipped once. Time and memory of a step
    grow with it; its privacy does not change."""

    @model_validator(mode="after")
    def _copies_differ(self) -> Self:
        if not self.flips and not self.crops:
            raise InvalidKey(
                "multiplicity",
                f"{self.multiplicity} copies would all be the same image. Set flips: true or "
                f"crops, or delete train.augment",
            )
        return self

    def refuse_larger(self, shape: tuple[int, ...]) -> None:
        """Raise InvalidKey if images of `shape` (C, H, W) are too small to be shifted so far."""
        if self.crops >= min(shape[1:]):
            raise InvalidKey(
                "crops", f"{self.crops} pixels, of images of {shape[1]} x {shape[2]}. Give fewer"
            )

    def copies(self, inputs_B: Tensor, marks_B: Tensor, step: int, seed: int) -> Tensor:
        """Make the copies of one step, shape (B, K, C, H, W); without the K, if that is 1.

        Args:
            inputs_B: Images, shape (B, C, H, W).
            marks_B: Hashes of the same images, int64, shape (B,); see `hash_images`.
            step: Counted from 0.
            seed: Public seed.
        """
        import torch

        flipped_BK, down_BK, right_BK = self.draws(marks_B, step, seed)
        height, width = inputs_B.shape[2:]
        rows = _mirror_positions(
            torch.arange(height, device=down_BK.device) + down_BK[..., None], height
        )
        columns = _mirror_positions(
            torch.arange(width, device=down_BK.device) + right_BK[..., None], width
        )
        columns = torch.where(flipped_BK[..., None], columns.flip(-1), columns)
        each = torch.arange(len(inputs_B), device=inputs_B.device)[:, None, None, None]
        pixels = inputs_B.permute(0, 2, 3, 1)
        picked = pixels[each, rows[..., :, None], columns[..., None, :]]
        copies = picked.movedim(-1, 2)
        return copies.squeeze(1) if self.multiplicity == 1 else copies

    def draws(self, marks_B: Tensor, step: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """(flipped, pixels down, pixels right) of each copy, shape (B, K) each."""
        import torch

        number = derive_public_seed(seed, "augment", step)
        copy_K = torch.arange(self.multiplicity, device=marks_B.device)
        bits = _mix_bits(_mix_bits(marks_B + number * 2**_BITS)[:, None] + copy_K)
        flipped = (bits & 1).bool() if self.flips else torch.zeros_like(bits, dtype=torch.bool)
        down, right = (_mix_bits(bits + axis) >> (63 - _BITS) & (2**_BITS - 1) for axis in (1, 2))
        wide = 2 * self.crops + 1
        return flipped, down % wide - self.crops, right % wide - self.crops


def hash_images(inputs: Tensor) -> Tensor:
    """Hash each image's bytes, int64, shape (N,): sum of bytes times fixed odd numbers."""
    import torch

    flat = inputs.flatten(1).contiguous().view(torch.uint8)
    place = torch.arange(flat.shape[1], device=inputs.device)
    factors = _mix_bits(place) | 1
    parts = [(rows.to(torch.int64) * factors).sum(1) for rows in torch.split(flat, _ROWS)]
    return _mix_bits(torch.cat(parts))


def _mirror_positions(place: Tensor, size: int) -> Tensor:
    """Mirror positions before 0 and from `size` on at the first and the last one."""
    import torch

    place = place.abs()
    return torch.where(place >= size, 2 * (size - 1) - place, place)


def _mix_bits(x: Tensor) -> Tensor:
    """SplitMix64 (Steele et al. 2014): a bijection of 64-bit numbers whose bits look random."""
    x = x + _to_signed(_GOLDEN)
    for factor, shift in ((_FIRST, 30), (_SECOND, 27)):
        x = (x ^ _shift_right(x, shift)) * _to_signed(factor)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift bits to the right, filling with zeros."""
    kept: int = 2 ** (64 - by) - 1
    return x >> by & kept


def _to_signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
