"""Batches are Poisson samples: every example joins every batch by its own coin."""

import math

import pytest
import torch

from dpsweep.core.seeds import Secret
from dpsweep.privacy.sampling import poisson_batch

N, STEPS = 400, 2000


def inclusions(rate: float) -> torch.Tensor:
    """Ones where an example is in a step's batch, shape (STEPS, N), float64."""
    secret = Secret.fixed("sampling")
    table = torch.zeros(STEPS, N, dtype=torch.float64)
    for t in range(STEPS):
        table[t, poisson_batch(N, rate, secret.stream(t, "sample"))] = 1
    return table


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_examples_join_at_the_sampling_rate(rate):
    share = inclusions(rate).mean().item()
    # 800,000 coins; five standard deviations are passed by chance once in two million times.
    assert share == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / (N * STEPS)))


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_batch_sizes_vary_as_a_binomial_does(rate):
    variance = inclusions(rate).sum(1).var().item()
    # Batches of fixed size would have none. The sample variance of 2000 nearly normal sizes has
    # a relative deviation of sqrt(2/1999) = 3.2 %; five of them.
    assert variance == pytest.approx(N * rate * (1 - rate), rel=5 * math.sqrt(2 / (STEPS - 1)))


def test_coins_are_independent_across_steps_and_examples():
    rate = 0.1
    coins = (inclusions(rate) - rate) / math.sqrt(rate * (1 - rate))
    # Shuffled epochs of ten batches would give the next step a correlation of -0.11 instead.
    for a, b in [(coins[:-1], coins[1:]), (coins[:-10], coins[10:]), (coins[:, :-1], coins[:, 1:])]:
        assert abs((a * b).mean().item()) < 5 / math.sqrt(a.numel())


def test_rate_one_takes_everyone():
    for t in range(20):
        batch = poisson_batch(N, 1.0, Secret.fixed("all").stream(t, "sample"))
        assert torch.equal(batch, torch.arange(N))


def test_batch_holds_each_index_once_in_ascending_order():
    batch = poisson_batch(N, 0.5, Secret.fixed("order").stream(0, "sample"))
    assert batch.dtype == torch.int64
    assert (batch.diff() > 0).all()


def test_batch_may_be_empty():
    assert poisson_batch(N, 1e-12, Secret.fixed("none").stream(0, "sample")).shape == (0,)
