"""Audits bound epsilon from below, as tightly as they say and no more often wrongly."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

from dpsweep.privacy.audit import (
    Audit,
    bound_epsilon,
    bound_epsilon_by_counting,
    bound_mu_by_fit,
    bound_probability,
    compute_log_ratio,
    epsilon_of_mu,
    epsilon_of_one_run,
    mu_of_epsilon,
    power_against,
    power_of_one_run,
)

DELTA = 1e-5


def gaussian_runs(mu, num_runs, rng, *, scale=1.0):
    """Log-ratios at q = 1 of runs that claim `mu`, with noise `scale` times what they should add.

    Absent is N(-mu^2/2, (scale mu)^2), present N(mu^2/2, (scale mu)^2).
    """
    half = mu * mu / 2
    return (
        rng.normal(-half, scale * mu, num_runs),
        rng.normal(half, scale * mu, num_runs),
    )


def audits(epsilon, num_runs, num_audits, *, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    mu = mu_of_epsilon(epsilon, DELTA)
    samples = (gaussian_runs(mu, num_runs, rng, scale=scale) for _ in range(num_audits))
    return [bound_epsilon("dp_sgd", *sample, epsilon, DELTA) for sample in samples]


@pytest.mark.parametrize("count", [0, 1, 37, 1999, 2000])
@pytest.mark.parametrize("error", [0.005, 0.025, 0.2])
def test_upper_bound_of_a_share_is_the_exact_one(count, error):
    exact = stats.binomtest(count, 2000, alternative="less").proportion_ci(
        confidence_level=1 - error, method="exact"
    )
    assert float(bound_probability(count, 2000, error)) == pytest.approx(exact.high, rel=1e-9)


@pytest.mark.parametrize("wins", [1001, 1180, 1999, 2000])
def test_fit_is_the_exact_lower_bound_of_the_share_of_pairs_won(wins):
    rng = np.random.default_rng(0)
    won = rng.permutation(2000) < wins
    absent = rng.uniform(0, 1, 2000)
    exact = stats.binomtest(wins, 2000, alternative="greater").proportion_ci(
        confidence_level=0.95, method="exact"
    )
    expected = max(0, math.sqrt(2) * stats.norm.ppf(exact.low))
    present = np.where(won, 2, -2) + rng.permutation(absent)
    assert bound_mu_by_fit(absent, present, 0.95) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 3.0])
def test_epsilon_of_mu_is_that_of_a_gaussian_mechanism_of_noise_one_over_mu(mu, delta):
    loss = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=1e-4)
    by_pld = loss.get_epsilon_for_delta(delta)
    assert epsilon_of_mu(mu, delta) == pytest.approx(by_pld, abs=1e-3)


@pytest.mark.parametrize(
    ("mu", "delta", "epsilon"),
    [  # by mpmath, 60 digits
        (1e-3, 1e-5, 0.001938724969860),
        (0.1, 1e-12, 0.647008125924993),
        (10.0, 1e-12, 119.588408712313),
        (50.0, 1e-12, 1600.78865830558),
        (50.0, 0.1, 1313.09030355251),
    ],
)
def test_epsilon_of_mu_is_right_at_the_extremes(mu, delta, epsilon):
    assert epsilon_of_mu(mu, delta) == pytest.approx(epsilon, rel=1e-12)
    assert mu_of_epsilon(epsilon, delta) == pytest.approx(mu, rel=1e-10)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.5, 8.0, 100.0, 1e4])
def test_mu_of_epsilon_undoes_epsilon_of_mu(epsilon, delta):
    back = epsilon_of_mu(mu_of_epsilon(epsilon, delta), delta)
    assert back == pytest.approx(epsilon, rel=1e-9, abs=1e-15)


def test_mu_too_small_to_exceed_delta_costs_no_epsilon():
    assert epsilon_of_mu(0.0, DELTA) == 0
    free = mu_of_epsilon(0.0, DELTA)
    assert 2 * stats.norm.cdf(free / 2) - 1 == pytest.approx(DELTA, rel=1e-9)
    assert epsilon_of_mu(0.99 * free, DELTA) == 0
    assert epsilon_of_mu(1.01 * free, DELTA) > 0


@pytest.mark.parametrize("epsilon", [2.0, 4.0, 8.0])
def test_4000_runs_show_85_percent_of_the_truth_and_rarely_more_than_it(epsilon):
    found = audits(epsilon, 4000, 300, seed=int(epsilon))
    assert np.median([audit.ratio for audit in found]) > 0.85
    assert np.median([audit.ratio for audit in found]) < 1
    # Of 300 true claims 5 % may be called violated, 15 with standard deviation 3.8; over 32,
    # 4.5 of them, has probability 3e-5.
    assert sum(audit.violated for audit in found) <= 32


def test_counting_is_wrong_no_more_often_than_it_says_where_it_is_tightest():
    # Randomized response keeps the truth with probability e / (1 + e): epsilon is exactly 1.
    rng = np.random.default_rng(3)
    absent = (rng.random((600, 4000)) > math.e / (1 + math.e)).astype(float)
    present = (rng.random((600, 4000)) < math.e / (1 + math.e)).astype(float)
    bounds = [
        bound_epsilon_by_counting(*pair, 1e-12, 0.8) for pair in zip(absent, present, strict=True)
    ]
    assert np.median(bounds) > 0.9
    # 20 % of 600 may exceed it, 120 with standard deviation 9.8; 5 of them: one in 3 million.
    assert sum(bound > 1 for bound in bounds) <= 169


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_fit_is_wrong_as_often_as_its_confidence_allows(epsilon):
    rng = np.random.default_rng(4)
    mu = mu_of_epsilon(epsilon, DELTA)
    bounds = [bound_mu_by_fit(*gaussian_runs(mu, 1000, rng), 0.8) for _ in range(1000)]
    # 200 of 1000 with standard deviation 12.6; counts are whole, so the bound errs a little less.
    assert 200 - 6 * 12.6 < sum(bound > mu for bound in bounds) < 200 + 5 * 12.6


def test_fit_of_a_poisson_sampled_run_does_not_exceed_what_the_accountant_says():
    # One step, q = 0.5, sigma = 1, whose curve is far from Gaussian; epsilon 3.53 by PLD.
    rng = np.random.default_rng(5)
    claimed = pld.from_gaussian_mechanism(1.0, sampling_prob=0.5).get_epsilon_for_delta(DELTA)
    noise = rng.normal(size=(2, 100_000))
    noise[1] += rng.random(100_000) < 0.5
    audit = bound_epsilon("dp_sgd", *compute_log_ratio(1.0, noise, 0.5), claimed, DELTA)
    assert 0.4 < audit.ratio < 0.6


def test_two_thirds_of_the_noise_is_a_violation():
    found = audits(4.0, 2000, 50, seed=6, scale=2 / 3)
    assert all(audit.violated and audit.ratio > 1.3 for audit in found)


def test_half_as_much_noise_again_is_seen_far_below_the_claim():
    found = audits(4.0, 2000, 50, seed=7, scale=3 / 2)
    assert not any(audit.violated for audit in found)
    assert all(0.3 < audit.ratio < 0.75 for audit in found)


def test_rare_leak_that_the_fit_overlooks_is_counted():
    rng = np.random.default_rng(8)
    absent, present = rng.normal(size=(2, 4000))
    present[rng.random(4000) < 0.05] += 20  # one canary in twenty is plain to see
    audit = bound_epsilon("dp_sgd", absent, present, 2.0, DELTA)
    assert audit.fitted < 1
    assert audit.counted > 2
    assert audit.lower == audit.counted
    assert audit.violated


def test_canary_that_is_plain_to_see_is_bounded_by_the_number_of_runs_alone():
    rng = np.random.default_rng(9)
    absent, present = rng.normal([[0], [1000]], 1, size=(2, 1000))
    by_count = bound_probability(0, 900, 0.025)
    expected = math.log((1 - DELTA - by_count) / by_count)
    assert bound_epsilon_by_counting(absent, present, DELTA, 0.95) == pytest.approx(expected)
    by_pairs = math.sqrt(2) * stats.norm.ppf(0.05 ** (1 / 1000))
    assert bound_mu_by_fit(absent, present, 0.95) == pytest.approx(by_pairs)


@pytest.mark.parametrize("value", ["normal", "constant"])
def test_identical_samples_show_nothing(value):
    rng = np.random.default_rng(10)
    sample = rng.normal(size=500) if value == "normal" else np.full(500, -0.3)
    audit = bound_epsilon("dp_sgd", sample, sample, 1.0, DELTA)
    assert (audit.counted, audit.fitted, audit.lower, audit.violated) == (0, 0, 0, False)


def test_scores_that_point_the_wrong_way_show_nothing():
    absent, present = gaussian_runs(1.0, 500, np.random.default_rng(11))
    assert bound_mu_by_fit(present, absent, 0.95) == 0
    assert bound_epsilon_by_counting(present, absent, DELTA, 0.95) == 0


def test_rising_score_of_the_ratio_is_fitted_as_the_ratio_itself():
    absent, present = gaussian_runs(1.0, 500, np.random.default_rng(12))
    same = bound_mu_by_fit(np.exp(absent), np.exp(present), 0.95)
    assert same == bound_mu_by_fit(absent, present, 0.95) > 0


def test_judge_splits_the_error_between_the_two_bounds():
    absent, present = gaussian_runs(2.0, 2000, np.random.default_rng(13))
    audit = bound_epsilon("disk", absent, present[:1500], 8.0, DELTA, confidence=0.9)
    counted = bound_epsilon_by_counting(absent, present[:1500], DELTA, 0.98)
    fitted = epsilon_of_mu(bound_mu_by_fit(absent, present[:1500], 0.92), DELTA)
    assert audit == Audit(
        method="disk",
        claimed=8.0,
        delta=DELTA,
        runs=1500,
        confidence=0.9,
        counted=pytest.approx(counted),
        fitted=pytest.approx(fitted),
    )
    assert 0 < audit.counted < audit.fitted == audit.lower
    assert audit.ratio == audit.fitted / 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_run_without_a_finite_ratio_is_refused(bad):
    absent, present = gaussian_runs(1.0, 100, np.random.default_rng(14))
    present[[3, 70]] = bad
    with pytest.raises(ValueError, match=r"present: 2 of 100 runs .* Mend those runs"):
        bound_epsilon("dp_sgd", absent, present, 1.0, DELTA)


@pytest.mark.parametrize("order", [1, -1])
def test_sorted_sample_is_refused(order):
    absent, present = gaussian_runs(1.0, 100, np.random.default_rng(15))
    with pytest.raises(ValueError, match=r"absent is sorted.*in the order they were run"):
        bound_epsilon("dp_sgd", np.sort(absent)[::order], present, 1.0, DELTA)


def test_runs_that_share_their_noise_are_refused():
    absent, _ = gaussian_runs(1.0, 100, np.random.default_rng(16))
    with pytest.raises(ValueError, match=r"coupled: .*rank correlation 1\.00.*of its own"):
        bound_mu_by_fit(absent, absent + 0.01, 0.95)


@pytest.mark.parametrize("shape", [(5,), (100, 2), ()])
def test_too_few_runs_or_several_numbers_a_run_are_refused(shape):
    with pytest.raises(ValueError, match=r"absent must hold one number a run .* got shape"):
        bound_mu_by_fit(np.zeros(shape), np.zeros(100), 0.95)


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, math.nan])
def test_delta_and_confidence_outside_the_open_unit_interval_are_refused(bad):
    sample = np.zeros(100)
    with pytest.raises(ValueError, match=r"confidence must lie in \(0, 1\), got"):
        bound_epsilon("dp_sgd", sample, sample, 1.0, DELTA, confidence=bad)
    with pytest.raises(ValueError, match=r"delta must lie in \(0, 1\), got"):
        bound_epsilon("dp_sgd", sample, sample, 1.0, bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_claim_of_no_epsilon_is_refused(bad):
    with pytest.raises(ValueError, match=r"claimed epsilon must be above 0, got"):
        bound_epsilon("dp_sgd", np.zeros(100), np.zeros(100), bad, DELTA)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_mu_and_epsilon_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=r"mu must lie in \[0, inf\), got"):
        epsilon_of_mu(bad, DELTA)
    with pytest.raises(ValueError, match=r"epsilon must lie in \[0, inf\), got"):
        mu_of_epsilon(bad, DELTA)


@pytest.mark.parametrize("q", [1e-3, 0.1, 0.5, 0.99])
def test_log_ratio_is_the_formula_where_that_is_stable(q):
    shift_S, centred_G = np.array([[0.1], [1.0], [4.0]]), np.linspace(-5, 8, 41)
    naive = np.log(1 - q + q * np.exp(centred_G - shift_S / 2))
    np.testing.assert_allclose(
        compute_log_ratio(shift_S, centred_G, q), naive, rtol=1e-11, atol=1e-14
    )


def test_log_ratio_without_sampling_is_the_gaussian_one():
    centred_G = np.array([-1e6, -1.0, 0.0, 2.5, 1e6])
    assert np.array_equal(compute_log_ratio(3.0, centred_G, 1.0), centred_G - 1.5)


def test_log_ratio_is_right_at_the_extremes():
    assert float(compute_log_ratio(0.0, 1e5, 0.01)) == pytest.approx(
        1e5 + math.log(0.01), rel=1e-14
    )
    assert float(compute_log_ratio(0.0, -1e5, 0.01)) == pytest.approx(math.log(0.99), rel=1e-14)
    assert float(compute_log_ratio(0.0, -1e5, 1 - 1e-10)) == pytest.approx(
        math.log(1e-10), rel=1e-7
    )
    assert float(compute_log_ratio(0.0, 1e-12, 1e-4)) == pytest.approx(1e-16, rel=1e-9)
    assert float(compute_log_ratio(0.0, 0.0, 0.3)) == 0


@pytest.mark.parametrize("q", [0.0, -0.1, 1.5, math.nan])
def test_log_ratio_refuses_a_sampling_rate_outside_the_unit_interval(q):
    with pytest.raises(ValueError, match=r"sampling_rate must lie in \(0, 1\], got"):
        compute_log_ratio(1.0, 0.0, q)


@pytest.mark.parametrize("error", [0.05, 1e-3])
def test_one_run_whose_guesses_are_all_right_is_bounded_by_their_number(error):
    # P(all n right) = (1 / (1 + e^-epsilon))^n is the error
    expected = -math.log(error ** (-1 / 400) - 1)
    assert epsilon_of_one_run(1000, 400, 400, 0.0, error) == pytest.approx(expected, rel=1e-9)
    assert epsilon_of_one_run(1000, 400, 400, 1e-5, error) < expected


def test_one_run_is_wrong_no_more_often_than_it_says_where_it_is_tightest():
    # Randomized response of each canary: every guess is right with probability e / (1 + e).
    rng = np.random.default_rng(20)
    correct = rng.binomial(1000, math.e / (1 + math.e), 2000)
    found, at = np.unique(correct, return_inverse=True)  # 2000 draws have some 80 values
    bounds = np.array([epsilon_of_one_run(1000, 1000, int(v), 0.0, 0.1) for v in found])[at]
    assert np.median(bounds) > 0.8
    # 10 % of 2000 may exceed it, 200 with standard deviation 13.4; 5 of them: one in 3 million.
    assert sum(bound > 1 for bound in bounds) <= 267


def test_one_run_of_coins_shows_nothing_and_delta_costs():
    assert epsilon_of_one_run(1000, 1000, 500, 1e-5, 0.05) == 0
    assert epsilon_of_one_run(10, 0, 0, 1e-5, 0.05) == 0
    free, charged = (epsilon_of_one_run(10_000, 1000, 800, d, 0.05) for d in (0.0, 1e-4))
    assert 0 < charged < free


@pytest.mark.parametrize("counts", [(10, 20, 5), (10, 5, 6), (10, 5, -1)])
def test_one_run_with_impossible_counts_is_refused(counts):
    with pytest.raises(ValueError, match=r"correct <= guesses <= canaries is needed, got"):
        epsilon_of_one_run(*counts, 1e-5, 0.05)


def test_power_is_how_often_weaker_noise_is_found():
    rng, mu = np.random.default_rng(21), mu_of_epsilon(4.0, DELTA)
    found = [
        epsilon_of_mu(bound_mu_by_fit(*gaussian_runs(mu / 0.9, 2000, rng), 0.992), DELTA) > 4.0
        for _ in range(300)
    ]
    expected = power_against(0.9, 4.0, DELTA, 2000, 0.99)
    # A share of 300 has a standard deviation of at most 0.029.
    assert abs(np.mean(found) - expected) < 5 * 0.029
    assert 0.2 < expected < 0.8
    assert power_against(1.0, 4.0, DELTA, 2000, 0.99) <= 0.01
    assert power_against(0.9, 4.0, DELTA, 20, 0.99) < 0.01


def test_power_of_one_run_is_none_for_a_tenth_less_noise_and_grows_as_noise_is_missing():
    powers = [power_of_one_run(share, 4.0, 1e-5, 200, 0.99) for share in (1.0, 0.9, 0.3, 0.05)]
    assert powers[0] == powers[1] == 0.0, "200 canaries cannot bound epsilon 4"
    assert power_of_one_run(0.05, 1.0, 1e-5, 1000, 0.99) == 1.0
    assert power_of_one_run(0.9, 1.0, 1e-5, 1000, 0.99) < 0.05
