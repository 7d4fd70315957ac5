"""Exploring trials and the final run keep one epsilon together, divided as the share says."""

import math
from dataclasses import replace

import pytest
from dp_accounting import dp_event, rdp
from scipy import stats

from dpsweep.privacy.accounting import Run, calibrate_noise, compose_runs
from dpsweep.privacy.renyi import compute_divergences, epsilon_at
from dpsweep.privacy.search_budget import SearchBudget, explore_noise

DELTA, RATE, STEPS, NUM = 1e-5, 0.02, 2500, 20
SCHEDULE = (STEPS, RATE)
ALIKE = SearchBudget("composition", 4.0, DELTA, 6, ((300, 0.1),), vary=False, share=0.1)
VARIED = SearchBudget(
    "composition", 4.0, DELTA, 13, ((100, 0.2), (400, 0.05), (500, 0.2)), vary=True, share=0.05
)


def per_step(sigma):
    return math.expm1(sigma**-2)


def test_reference_of_twenty_trials_at_a_total_of_4():
    """Own epsilon of the released model: 0.76 by equal shares, 3.79 where exploring costs 1.0."""
    equal, _ = calibrate_noise(4.0, DELTA, RATE, STEPS * NUM)
    own = Run(RATE, equal.noise_multiplier, STEPS).epsilon(DELTA)
    assert own == pytest.approx(0.76, abs=0.006)
    share = 0.0975  # of mu squared
    exploring, final = explore_noise(4.0, DELTA, SCHEDULE, NUM, share)
    trials = [Run(RATE, exploring, STEPS)] * NUM
    assert compose_runs(trials, DELTA) == pytest.approx(1.05, abs=0.01)
    assert Run(RATE, final, STEPS).epsilon(DELTA) == pytest.approx(3.79, abs=0.01)


@pytest.mark.parametrize("share", [0.02, 0.05, 0.3, 0.9])
def test_all_runs_spend_the_budget_and_not_more_and_the_share_is_that_of_mu_squared(share):
    exploring, final = explore_noise(2.0, DELTA, (300, 0.1), 5, share)
    runs = [Run(0.1, exploring, 300)] * 5 + [Run(0.1, final, 300)]
    assert 0.99 * 2 < compose_runs(runs, DELTA) <= 2
    parts = 5 * per_step(exploring), per_step(final)
    assert parts[0] / sum(parts) == pytest.approx(share, rel=1e-9)


def test_equal_parts_of_the_share_are_equal_shares():
    exploring, final = explore_noise(4.0, DELTA, (300, 0.1), 9, 0.9)
    equal = replace(ALIKE, num_runs=10, share=None).noise((300, 0.1))
    assert exploring == pytest.approx(final, rel=1e-6)
    assert final == pytest.approx(equal, rel=0.005)


def test_budget_covers_the_exploring_runs_and_one_final_run():
    (schedule,) = ALIKE.schedules
    trial = Run(0.1, ALIKE.noise(schedule), 300)
    final = Run(0.1, ALIKE.noise(schedule, final=True), 300)
    assert trial.noise_multiplier > 2 * final.noise_multiplier
    assert ALIKE.covers([trial] * 5 + [final])
    assert ALIKE.covers([trial] * 6)
    assert not ALIKE.covers([trial] * 6 + [final]), "one run too many"
    assert not ALIKE.covers([trial] * 4 + [final] * 2), "two final runs"
    louder = replace(final, noise_multiplier=0.999 * final.noise_multiplier)
    assert not ALIKE.covers([trial] * 5 + [louder])
    assert not ALIKE.covers([trial] * 5 + [replace(final, steps=301)])


def test_runs_of_lengths_that_results_choose_keep_the_budget_at_one_order():
    """Every exploring run and the final one at the corners where they lose most."""
    assert VARIED.cap.orders == VARIED.final_cap.orders
    (order,) = VARIED.cap.orders
    for last in VARIED.schedules:
        accountant = rdp.RdpAccountant([order])
        runs = []
        for i in range(13):
            schedule = last if i == 12 else VARIED.schedules[i % 3]
            steps, rate = schedule
            runs.append(Run(rate, VARIED.noise(schedule, final=i == 12), steps))
            step = dp_event.GaussianDpEvent(runs[-1].noise_multiplier)
            accountant.compose(dp_event.PoissonSampledDpEvent(rate, step), steps)
        lost = sum(float(compute_divergences(run, (order,))[0]) for run in runs)
        assert 0.9999 * 4 < epsilon_at(order, lost, DELTA) <= 4
        # dp-accounting adds up absolute values at fractional orders, and says a little more.
        assert 0.999 * 4 < accountant.get_epsilon(DELTA) <= 1.001 * 4
        assert compose_runs(runs, DELTA) <= 4
        assert VARIED.covers(runs)
        assert not VARIED.covers([*runs[:11], runs[12], runs[12]]), "two final runs"
        own = runs[-1].epsilon(DELTA)
        assert own > 0.75 * 4, "the final run has most of the budget"


def test_share_of_the_divergence_is_what_exploring_gets_where_lengths_vary():
    (trial,), (final,) = VARIED.cap.limits, VARIED.final_cap.limits
    assert 12 * trial / (12 * trial + final) == pytest.approx(0.05)


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_little_epsilon_is_used_up(share):
    """One grid for all epsilons left up to half of 0.1 unused; here the exact delta is known."""
    steps, num, epsilon, delta = 20_000, 50, 0.1, 1e-7
    exploring, final = explore_noise(epsilon, delta, (steps, 1.0), num, share)
    mu = math.sqrt(num * steps / exploring**2 + steps / final**2)
    tail = epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)
    exact = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(tail)
    assert 0.9 * delta < exact <= delta


def test_runs_at_little_epsilon_and_two_noise_levels_are_composed_closely():
    _, final = explore_noise(0.1, DELTA, SCHEDULE, NUM, 0.05)
    own = Run(RATE, final, STEPS).epsilon(DELTA)
    assert 0.095 < own < 0.1
