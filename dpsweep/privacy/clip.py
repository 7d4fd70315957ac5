"""Clipping: the one place where the answers of examples are bounded and summed.

Each style here has sensitivity `clip_norm`: adding or removing one example moves the sum
by at most that, in L2 over all parameters together. An answer that is not finite, or so
large that its norm overflows, counts as zero: a NaN would otherwise pass every comparison
and carry one example past the bound.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpsweep.core.types import Clipped, PerExample


class Clip(Protocol):
    """A style of clipping."""

    @property
    def clip_norm(self) -> float:
        """L2 bound on one example's answer, in gradient units."""

    def factor(self, norm_B: Tensor) -> Tensor:
        """What each answer of norm `norm_B`, shape (B,), is multiplied by; same shape."""


@dataclass(frozen=True)
class Flat:
    """min(1, C / |u|): answers inside the ball stay as they are (Abadi et al. 2016)."""

    clip_norm: float

    def factor(self, norm_B: Tensor) -> Tensor:
        return (self.clip_norm / norm_B).clamp(max=1)  # C / 0 is inf, clamped to 1


@dataclass(frozen=True)
class Automatic:
    """C / (|u| + s): every answer is scaled to nearly C (Bu et al. 2023, arXiv:2206.07136).

    Attributes:
        stability: s, in gradient units; keeps the smallest answers from blowing up.
    """

    clip_norm: float
    stability: float = 0.01

    def factor(self, norm_B: Tensor) -> Tensor:
        return self.clip_norm / (norm_B + self.stability)


CLIPPINGS: dict[str, Callable[[float], Clip]] = {"flat": Flat, "automatic": Automatic}


def clipped_sum(answer: PerExample, clip: Clip) -> Clipped:
    """sum_i factor_i u_i over the B examples of `answer`; zeros of the right shape if B = 0."""
    squares = [g.unsqueeze(-1).flatten(1).square().sum(1) for g in answer.values()]
    norm_B = torch.stack(squares).sum(0).sqrt()
    usable_B = torch.isfinite(norm_B)
    factor_B = torch.where(usable_B, clip.factor(norm_B), 0)
    if not bool(usable_B.all()):  # 0 * NaN is NaN, so such answers are replaced, not scaled
        answer = PerExample({k: torch.where(_like(usable_B, g), g, 0) for k, g in answer.items()})
    return Clipped({k: torch.tensordot(factor_B, g, dims=1) for k, g in answer.items()})


def _like(mask_B: Tensor, leaf: Tensor) -> Tensor:
    """`mask_B`, shape (B,), shaped to broadcast over `leaf`, shape (B, ...)."""
    return mask_B.view(-1, *(1,) * (leaf.dim() - 1))
