"""Divergences agree with dp-accounting and the exact Gaussian, and a cap holds what it promises."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from scipy import integrate, stats

from dpsweep.privacy.accounting import Run
from dpsweep.privacy.renyi import (
    LEAST_NOISE,
    ORDERS,
    Cap,
    compute_divergences,
    divergence_at,
    epsilon_at,
)

DELTA = 1e-5
RUNS = [
    Run(sampling_rate=0.02, noise_multiplier=1.376, steps=2500),
    Run(sampling_rate=0.3, noise_multiplier=0.8, steps=10),
    Run(sampling_rate=0.001, noise_multiplier=0.5, steps=1000),
    Run(sampling_rate=0.5, noise_multiplier=14.0, steps=60),
    Run(sampling_rate=0.9, noise_multiplier=0.3, steps=3),
]
WHOLE = tuple(a for a in ORDERS if a == int(a))


def by_dp_accounting(run: Run, orders: tuple[float, ...]) -> np.ndarray:
    step = dp_event.PoissonSampledDpEvent(
        run.sampling_rate, dp_event.GaussianDpEvent(run.noise_multiplier)
    )
    return rdp.RdpAccountant(orders).compose(step, run.steps).rdp


@pytest.mark.parametrize("run", RUNS, ids=repr)
def test_at_whole_orders_it_is_the_closed_form_of_dp_accounting(run):
    np.testing.assert_allclose(
        compute_divergences(run, WHOLE), by_dp_accounting(run, WHOLE), rtol=1e-8
    )


@pytest.mark.parametrize("order", [1.1, 1.5, 2.7, 9.3])
@pytest.mark.parametrize("run", RUNS[:2], ids=repr)
def test_between_whole_orders_it_is_the_integral(run, order):
    q, sigma = run.sampling_rate, run.noise_multiplier

    def integrand(x):
        ratio = 1 - q + q * math.exp((2 * x - 1) / (2 * sigma**2))
        return stats.norm.pdf(x, scale=sigma) * ratio**order

    peak = order + 12 * sigma
    moment, _ = integrate.quad(integrand, -12 * sigma, peak, epsabs=0, epsrel=1e-12, limit=500)
    expected = run.steps * math.log(moment) / (order - 1)
    assert compute_divergences(run, (order,))[0] == pytest.approx(expected, rel=1e-6)


def test_without_sampling_it_is_that_of_the_gaussian():
    found = compute_divergences(Run(1.0, 3.0, 20), (1.5, 40))
    np.testing.assert_allclose(found, [1.5 * 20 / 18, 40 * 20 / 18])


@pytest.mark.parametrize("run", RUNS, ids=repr)
def test_it_grows_with_the_order_and_the_integral_meets_the_sum(run):
    assert np.all(np.diff(compute_divergences(run)) > 0)
    q, sigma = run.sampling_rate, run.noise_multiplier
    below, at, above = (
        compute_divergences(Run(q, sigma, 1), (a,))[0] * (a - 1) for a in (31, 31.5, 32)
    )
    assert at <= (below + above) / 2 * (1 + 1e-9)  # log A is convex in the order
    assert below < at < above


def test_without_noise_it_is_infinite():
    assert np.all(np.isinf(compute_divergences(Run(0.1, 0.0, 5))))
    assert epsilon_at(2.0, math.inf, DELTA) == math.inf


@pytest.mark.parametrize(("order", "divergence"), [(1.5, 3.0), (8, 0.4), (64, 0.1)])
def test_epsilon_of_a_divergence_is_that_of_dp_accounting_and_goes_back(order, divergence):
    expected, _ = rdp.compute_epsilon([order], [divergence], DELTA)
    assert epsilon_at(order, divergence, DELTA) == pytest.approx(expected)
    assert divergence_at(order, expected, DELTA) == pytest.approx(divergence)


@pytest.mark.parametrize("orders", [(6.0,), (2.5, 12.0)])
@pytest.mark.parametrize("schedule", [(2500, 0.02), (90, 0.3), (5, 1.0)])
def test_noise_under_a_cap_is_the_least_that_is_admitted(orders, schedule):
    cap = Cap.over(RUNS[:1]).at(orders)
    steps, rate = schedule
    sigma = cap.noise(steps, rate)
    assert cap.admits(Run(rate, sigma, steps))
    assert not cap.admits(Run(rate, sigma * (1 - 1e-4), steps))
    assert not cap.admits(Run(rate, sigma, math.ceil(steps * 1.001)))


def test_run_gets_back_its_own_noise_and_all_runs_pass_the_cap_over_them():
    run = RUNS[0]
    assert Cap.over([run]).noise(run.steps, run.sampling_rate) == pytest.approx(1.376, rel=1e-5)
    cap = Cap.over(RUNS)
    assert all(cap.admits(run) for run in RUNS)
    assert not all(Cap.over(RUNS[:-1]).admits(run) for run in RUNS)


def test_generous_cap_gives_the_least_noise_and_an_empty_one_none():
    assert Cap((2.0,), (1e9,)).noise(1, 0.01) == LEAST_NOISE
    with pytest.raises(ArithmeticError, match="nothing may be lost"):
        Cap((2.0,), (-0.1,)).noise(1, 0.01)
    with pytest.raises(ArithmeticError, match="not enough"):
        Cap((2.0,), (1e-30,)).noise(1, 1.0)
