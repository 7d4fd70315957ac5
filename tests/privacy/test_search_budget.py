"""A whole search costs what docs/concepts/accounting.md and dp-accounting say, within budget."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from scipy import stats

from dpsweep.core.errors import InvalidKey
from dpsweep.privacy.accounting import Run, calibrate_noise, compose_runs
from dpsweep.privacy.profiles import ProfileCap
from dpsweep.privacy.renyi import Cap
from dpsweep.privacy.search_budget import SearchBudget, choose_cap, draw_num_trials, total_epsilon

DELTA = 1e-5
BASE = {1: Run(0.02, 4.145, 2500), 4: Run(0.02, 1.376, 2500)}
ALIKE = SearchBudget("composition", 4.0, DELTA, 30, ((500, 0.02),), vary=False)
VARIED = SearchBudget(
    "composition", 4.0, DELTA, 12, ((100, 0.2), (400, 0.05), (500, 0.2), (2000, 0.05)), vary=True
)


def spent(charged, run, num_runs):
    return total_epsilon(charged, Cap.over([run]), num_runs, DELTA)[0]


def by_dp_accounting(run: Run, mean: float) -> float:
    step = dp_event.PoissonSampledDpEvent(
        run.sampling_rate, dp_event.GaussianDpEvent(run.noise_multiplier)
    )
    trial = dp_event.SelfComposedDpEvent(step, run.steps)
    event = dp_event.RepeatAndSelectDpEvent(trial, mean, shape=1)
    return rdp.RdpAccountant().compose(event).get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("base", "mean", "epsilon"),
    [(1, 10, 2.13), (1, 30, 2.41), (1, 100, 2.68), (4, 10, 7.35), (4, 30, 8.34), (4, 100, 9.28)],
)
def test_private_selection_costs_the_reference_values(base, mean, epsilon):
    ours = spent("private_selection", BASE[base], mean)
    assert ours == pytest.approx(epsilon, rel=0.01)
    assert ours == pytest.approx(by_dp_accounting(BASE[base], mean), rel=0.002)


@pytest.mark.parametrize(
    ("base", "trials", "epsilon"),
    [(1, 10, 3.54), (1, 30, 6.66), (1, 100, 13.78), (4, 10, 15.23), (4, 30, 30.99)],
)
def test_renyi_composition_costs_the_reference_values(base, trials, epsilon):
    assert spent("composition", BASE[base], trials) == pytest.approx(epsilon, rel=0.01)


def test_hundred_dear_trials_cost_less_than_the_reference_which_sums_a_series_without_signs():
    # Below order 2 dp-accounting adds up absolute values of an alternating series.
    assert 69.12 < spent("composition", BASE[4], 100) < 74.85
    assert spent("composition", BASE[4], 100) == pytest.approx(74.85, rel=0.04)


def test_inverse_private_selection_gives_the_reference_noise():
    whole = SearchBudget("private_selection", 4.0, DELTA, 30, ((2500, 0.02),), vary=False)
    sigma = whole.noise((2500, 0.02))
    # By Renyi alone it was 2.58, with which dp-accounting's figure is 4.
    assert sigma < 0.8 * 2.58
    assert ProfileCap.over([Run(0.02, sigma, 2500)], 30, DELTA).epsilon == pytest.approx(
        4.0, rel=1e-4
    )
    assert by_dp_accounting(Run(0.02, 2.58, 2500), 30) == pytest.approx(4.0, rel=0.01)


def test_one_trial_and_one_more_each_change_the_cost():
    costs = [spent("composition", BASE[4], n) for n in (1, 29, 30)]
    assert costs[0] == pytest.approx(4.0, rel=0.01)
    assert costs[2] > costs[1] * 1.01
    means = [spent("private_selection", BASE[4], n) for n in (29, 30)]
    assert means[1] > means[0] * 1.001


@pytest.mark.parametrize("charged", ["composition", "private_selection"])
def test_what_is_needed_of_a_cap_proves_as_much_as_all_of_it(charged):
    epsilon, needed = total_epsilon(charged, Cap.over([BASE[4]]), 30, DELTA)
    assert len(needed.orders) == {"composition": 1, "private_selection": 2}[charged]
    assert total_epsilon(charged, needed, 30, DELTA)[0] == pytest.approx(epsilon, rel=1e-12)


def test_drawn_numbers_follow_the_law_that_the_accountant_assumes():
    mean, count = 6.0, 20_000
    rng = np.random.default_rng(3)
    drawn = np.array([draw_num_trials(mean, rng) for _ in range(count)])
    assert drawn.min() == 1
    expected = [stats.geom.pmf(k, 1 / mean) * count for k in range(1, 20)]
    observed = [np.count_nonzero(drawn == k) for k in range(1, 20)]
    tail = count - sum(expected), count - sum(observed)
    # The seed is fixed; of other seeds one in 10,000 would fail.
    assert stats.chisquare([*observed, tail[1]], [*expected, tail[0]]).pvalue > 1e-4
    assert drawn.mean() == pytest.approx(mean, rel=0.03)


def test_budget_of_runs_alike_is_met_within_two_percent_and_never_broken():
    run = Run(0.02, ALIKE.noise((500, 0.02)), 500)
    assert 0.98 * 4 < compose_runs([run] * 30, DELTA) <= 4
    assert compose_runs([run] * 31, DELTA) > 4
    assert ALIKE.covers([run] * 30)
    assert not ALIKE.covers([run] * 31)
    assert not ALIKE.covers(
        [run] * 29 + [replace(run, noise_multiplier=run.noise_multiplier * 0.9999)]
    )
    assert not ALIKE.covers([replace(run, steps=501)])


@pytest.mark.parametrize("seed", range(3))
def test_budget_holds_for_runs_chosen_in_any_way(seed):
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(VARIED.num_runs):
        rate = math.exp(rng.uniform(math.log(0.05), math.log(0.2)))
        steps = round(rng.uniform(20, 100) / rate)
        runs.append(Run(rate, VARIED.noise((steps, rate)), steps))
    (order,) = VARIED.cap.orders
    step = [
        (dp_event.PoissonSampledDpEvent(r.sampling_rate, dp_event.GaussianDpEvent(s)), r.steps)
        for r in runs
        for s in [r.noise_multiplier]
    ]
    accountant = rdp.RdpAccountant([order])
    for event, steps in step:
        accountant.compose(event, steps)
    assert 0.999 * 4 < accountant.get_epsilon(DELTA) <= 4
    assert compose_runs(runs, DELTA) < 4
    assert VARIED.covers(runs)
    assert not VARIED.covers([*runs, runs[0]])
    quieter = replace(runs[0], noise_multiplier=runs[0].noise_multiplier * 0.999)
    assert not VARIED.covers([quieter])


def test_order_is_chosen_so_that_no_corner_needs_much_more_noise_than_by_itself():
    for steps, rate in VARIED.schedules:
        alone, _ = calibrate_noise(4.0, DELTA, rate, steps * VARIED.num_runs)
        assert 1 < VARIED.noise((steps, rate)) / alone.noise_multiplier < 1.15


def test_selection_over_varied_lengths_keeps_one_cap_at_both_epsilons():
    whole = replace(VARIED, charged="private_selection")
    first, second = whole.cap.epsilons
    assert 2 * first + second <= 4
    worst = 0.0
    for steps, rate in whole.schedules:
        run = Run(rate, whole.noise((steps, rate)), steps)
        assert whole.covers([run] * 40)  # their number is random and may be large
        cost = ProfileCap.over([run], 12, DELTA).epsilon
        assert cost <= 4
        assert cost < by_dp_accounting(run, 12)
        worst = max(worst, cost)
    assert worst > 0.98 * 4
    assert not whole.covers([replace(run, noise_multiplier=0.999 * run.noise_multiplier)])


def test_cap_over_the_corners_lets_the_inside_through():
    ends = [calibrate_noise(4.0, DELTA, rate, steps)[0] for steps, rate in VARIED.schedules]
    rng = np.random.default_rng(0)
    for charged in ("composition", "private_selection"):
        cap = choose_cap(ends, charged, 12, DELTA)
        assert all(cap.admits(run) for run in ends)
        for _ in range(2):
            rate = rng.uniform(0.05, 0.2)
            steps = round(rng.uniform(20, 100) / rate)
            assert cap.admits(calibrate_noise(4.0, DELTA, rate, steps)[0])
        assert not cap.admits(calibrate_noise(4.2, DELTA, 0.2, 500)[0])


@pytest.mark.parametrize("charged", ["composition", "private_selection"])
def test_budget_that_no_noise_keeps_is_refused_with_a_remedy(charged):
    whole = replace(VARIED, charged=charged, epsilon=1e-5)
    with pytest.raises(InvalidKey, match=r"1e-05 is too little for 12 runs by .* fewer trials"):
        whole.noise((100, 0.2))
