"""A chain is its filters one after the other."""

import math

import pytest
import torch

from dpsweep.core.types import Released
from dpsweep.filters.base import Chain, Public
from dpsweep.filters.design import COEFFICIENT_SETS, butterworth
from dpsweep.filters.iir import Iir
from dpsweep.filters.lti import Ema, Momentum, Riccati
from dpsweep.filters.spectral import Shelf

NOWHERE = Public(step=0, params={}, noise_std=0.0)


def gradients(steps: int) -> list[Released]:
    rng = torch.Generator().manual_seed(7)
    return [Released({"w": torch.randn(5, 2, generator=rng)}) for _ in range(steps)]


def test_links_filter_in_the_order_they_are_given():
    first, second = Shelf(0.3, 0.6), Ema(0.4)
    chain = Chain((first, second))
    state = chain.init({})
    ours, theirs = first.init({}), second.init({})
    for grad in gradients(4):
        out, state = chain.apply(grad, state, NOWHERE)
        between, ours = first.apply(grad, ours, NOWHERE)
        expected, theirs = second.apply(between, theirs, NOWHERE)
        assert torch.equal(out["w"], expected["w"])


def test_each_link_has_its_own_memory():
    twice, once = Chain((Ema(0.4), Ema(0.4))), Chain((Ema(0.4),))
    state_of_two, state_of_one = twice.init({}), once.init({})
    for grad in gradients(3):
        out, state_of_two = twice.apply(grad, state_of_two, NOWHERE)
        single, state_of_one = once.apply(grad, state_of_one, NOWHERE)
    assert torch.equal(state_of_two[0]["w"], state_of_one[0]["w"])
    assert torch.equal(single["w"], state_of_two[0]["w"])
    assert not torch.equal(out["w"], single["w"])


def test_empty_chain_hands_the_gradient_through():
    (grad,) = gradients(1)
    out, state = Chain(()).apply(grad, Chain(()).init({}), NOWHERE)
    assert out is grad
    assert state == ()


# Noise through several filters.

LOW = Iir(*butterworth(2, 0.3))
PUBLISHED_ONE = Iir(*COEFFICIENT_SETS["a6_b5_m1"])
CHAINS = {
    "two averages": Chain((Ema(0.4), Ema(0.7))),
    "three averages": Chain((Ema(0.4), Ema(0.7), Ema(0.5))),
    "opposite filters": Chain((LOW, PUBLISHED_ONE)),
    "low pass and heavy ball": Chain((LOW, Momentum(0.6))),
    "settling gain and low pass": Chain((Riccati(0.8, 0.1), LOW)),
    "space, then time": Chain((Shelf(0.4, 0.7), Ema(0.5))),
    "time, space, time": Chain((Ema(0.5), Shelf(0.4, 0.7, "exponential"), Momentum(0.3))),
    "shelf of each tensor": Chain((Shelf(0.4, 0.7, scope="tensor"), Momentum(0.5), LOW)),
    "two shelves": Chain((Shelf(0.4, 0.7), Ema(0.6), Shelf(0.6, 0.5, "butterworth"))),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_noise_gain_is_measured_on_white_noise(chain):
    num, steps = 40_000, 60  # after which all of these have settled
    rng, state = torch.Generator().manual_seed(3), chain.init({})
    for t in range(steps):
        white = Released({"w": torch.randn(num, generator=rng, dtype=torch.float64)})
        out, state = chain.apply(white, state, Public(step=t, params={}, noise_std=1.0))
    # Shelf correlates 40,000 draws at most fivefold: relative standard deviation sqrt(10 / 40000)
    # or less. Five of them: one false alarm in two million for each chain.
    assert out["w"].square().mean().item() == pytest.approx(
        chain.noise_gain, rel=5 * math.sqrt(10 / num)
    )


@pytest.mark.parametrize(
    "link", [Ema(0.3), Riccati(0.3, 0.2), Momentum(0.9), LOW, Shelf(0.2, 0.9)], ids=repr
)
def test_noise_gain_of_one_filter_is_its_own_exactly(link):
    assert Chain((link,)).noise_gain == link.noise_gain


def test_noise_gain_of_none_is_one():
    assert Chain(()).noise_gain == 1.0


@pytest.mark.parametrize("over_time", [Ema(0.3), Momentum(0.5), LOW], ids=repr)
def test_gains_over_coordinates_and_over_time_multiply(over_time):
    for shelf in (Shelf(0.2, 0.9), Shelf(0.3, 0.5, "exponential")):
        product = shelf.noise_gain * over_time.noise_gain
        assert Chain((shelf, over_time)).noise_gain == pytest.approx(product, rel=1e-12)
        assert Chain((over_time, shelf)).noise_gain == pytest.approx(product, rel=1e-12)


def test_gains_of_two_shelves_do_not_multiply():
    gain = Chain((Shelf(0.5, 0.5), Shelf(0.5, 0.5))).noise_gain
    assert gain == pytest.approx(0.5 + 0.5 * 0.5**4, abs=1e-6)  # one bin in a million


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.5), (0.1, 0.9), (0.03, 0.04)])
def test_noise_gain_of_two_averages_is_the_sum_of_squares_of_their_convolution(first, second):
    # h = h_1 * h_2 with h_i[t] = k_i (1 - k_i)^t; sum_t h_t^2 in closed form.
    p, q = 1 - first, 1 - second
    closed = (first * second) ** 2 * (1 + p * q) / ((1 - p * q) * (1 - p * p) * (1 - q * q))
    gain = Chain((Ema(first), Ema(second))).noise_gain
    assert gain == pytest.approx(closed, rel=1e-9)
    assert Chain((Ema(second), Ema(first))).noise_gain == pytest.approx(gain, rel=1e-12)


def test_long_memories_are_resolved_by_the_frequencies_of_the_sum():
    slow = 1e-3  # half a million frequencies against a line of width 1e-3
    p = 1 - slow
    closed = slow**4 * (1 + p * p) / (1 - p * p) ** 3
    assert Chain((Ema(slow), Ema(slow))).noise_gain == pytest.approx(closed, rel=1e-6)
