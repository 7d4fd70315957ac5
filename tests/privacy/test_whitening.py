"""White coordinates are the same whichever eigenvectors the library happens to return."""

import pytest
import torch

from dpsweep.privacy.whitening import Whitening


def covariance(variances: list[float]) -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    n = len(variances)
    basis, _ = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=torch.float64))
    return basis @ torch.diag(torch.tensor(variances, dtype=torch.float64)) @ basis.T


def test_basis_of_a_repeated_variance_does_not_depend_on_the_library(monkeypatch):
    k = covariance([0.2, 0.5, 0.5, 0.5, 0.9, 0.9])
    once = Whitening.of(k)
    variances, vectors = torch.linalg.eigh(k)
    turned = vectors.clone()
    for group in (slice(1, 4), slice(4, 6)):  # another basis of the same spaces, and other signs
        size = group.stop - group.start
        turn, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
        turned[:, group] = -vectors[:, group] @ turn
    assert (turned - vectors).abs().max() > 0.1
    monkeypatch.setattr(torch.linalg, "eigh", lambda _: (variances, turned))
    again = Whitening.of(k)
    torch.testing.assert_close(again.vectors, once.vectors, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variances", [[1.0], [0.5, 0.5], [0.1, 0.2, 0.2, 1.0]])
def test_whitened_and_restored_is_the_same_and_has_the_covariance(variances):
    k = covariance(variances)
    whitening = Whitening.of(k)
    x = torch.randn(4, len(variances), dtype=torch.float64)
    torch.testing.assert_close(whitening.restore(whitening.whiten(x)), x)
    root = whitening.vectors * whitening.variances.sqrt()
    torch.testing.assert_close(root @ root.T, k)
    torch.testing.assert_close(whitening.whiten(root.T).T, torch.eye(len(variances)).double())


def test_nearly_empty_directions_are_dropped():
    assert len(Whitening.of(covariance([1e-6, 0.3, 1.0])).variances) == 2


@pytest.mark.parametrize("block", [12, 17, 23, 64, 200])
@pytest.mark.parametrize("keep", [0.5, 0.9, 0.99])
def test_coordinates_of_long_blocks_are_white_to_rounding(block, keep):
    frequency = torch.arange(block // 2 + 1)
    passed = (frequency <= keep * block / 2).double() * 0.7 + 0.3 * (frequency == 0)
    lag = (torch.arange(block)[:, None] - torch.arange(block)) % block
    k = torch.fft.irfft(passed, n=block)[lag]
    whitening = Whitening.of(k)
    root = whitening.vectors / whitening.variances.sqrt()
    white = root.T @ k @ root  # what docs/concepts/privacy.md argues from: W W' = I
    assert torch.linalg.eigvalsh(white).max().item() <= 1 + 1e-9
