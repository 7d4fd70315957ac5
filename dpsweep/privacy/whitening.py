"""Coordinates in which low-passed white noise is white again, for privacy/spectral.py.

    K = V diag(lam) V',     y = diag(lam^-1/2) V' x,     x = V diag(lam^1/2) y

If x has covariance K, y has the identity's.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 1e-4  # of the largest variance; directions below it are dropped
_SAME = 1e-9  # of the largest variance; variances closer than that are one, repeated


@dataclass(frozen=True, eq=False)
class Whitening:
    """White coordinates of a few correlated numbers.

    Attributes:
        vectors: V, the orthonormal directions kept, shape (k, r), float64.
        variances: lam, of low-passed white noise along each, shape (r,), float64.
    """

    vectors: Tensor
    variances: Tensor

    @classmethod
    def of(cls, covariance: Tensor) -> Self:
        """From K, shape (k, k). Nearly empty directions are dropped; privacy/spectral.py says why.

        Symmetric low-passes repeat their eigenvalues, and within one any basis is right. It is
        chosen here, not by the library, so that a secret means the same noise on every machine.
        """
        variances, vectors = torch.linalg.eigh(covariance)
        kept = variances > _SMALLEST * variances.max()
        variances, vectors = variances[kept], vectors[:, kept]
        steps = (variances.diff() > _SAME * variances.max()).cumsum(0)
        group_r = torch.cat([steps.new_zeros(1), steps])
        bases = [_canonical_basis(vectors[:, group_r == g]) for g in range(int(group_r[-1]) + 1)]
        whitening = cls(torch.cat(bases, 1), variances)
        white = whitening.whiten(whitening.whiten(covariance).T)
        if not torch.allclose(white, torch.eye(len(variances)).to(white), rtol=0, atol=1e-6):
            raise ArithmeticError(
                "whitened coordinates of a low-pass are not white: sensitivity > C"
            )
        return whitening

    def whiten(self, lags: Tensor) -> Tensor:
        """diag(lam^-1/2) V' along the last axis; float64 in, float64 out."""
        return lags @ self._whitening

    def restore(self, white: Tensor) -> Tensor:
        """V diag(lam^1/2) along the last axis, in float64, given back in the dtype it came."""
        return (white.double() @ self._back).to(white.dtype)

    def to(self, device: torch.device) -> Self:
        """Copy to `device` once; a step would wait for each copy."""
        return replace(self, vectors=self.vectors.to(device), variances=self.variances.to(device))

    @cached_property
    def _whitening(self) -> Tensor:
        return self.vectors / self.variances.sqrt()

    @cached_property
    def _back(self) -> Tensor:
        return (self.vectors * self.variances.sqrt()).T


def _canonical_basis(vectors: Tensor) -> Tensor:
    """The orthonormal basis of the space of `vectors` that a fixed generic frame leads to."""
    frame = torch.from_numpy(
        np.random.Generator(np.random.Philox(0)).standard_normal(vectors.shape)
    )
    turn, triangle = torch.linalg.qr(vectors.T @ frame)  # orthogonal, so it never leaves the space
    return vectors @ torch.where(triangle.diagonal() < 0, -turn, turn)
