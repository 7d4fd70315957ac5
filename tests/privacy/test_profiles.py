"""Private selection by privacy profiles: reference figures, and a case with an exact answer."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from dpsweep.privacy.accounting import Run, calibrate_noise
from dpsweep.privacy.profiles import ProfileCap, profile_delta
from dpsweep.privacy.renyi import Cap
from dpsweep.privacy.search_budget import find_selection_cap, selection_epsilon, total_epsilon

DELTA = 1e-5
CHEAP, DEAR = Run(0.02, 4.145, 2500), Run(0.02, 1.376, 2500)


@pytest.mark.parametrize(
    ("run", "mean", "epsilon"),
    [
        (CHEAP, 10, 1.49),
        (CHEAP, 30, 1.75),
        (CHEAP, 100, 2.02),
        (DEAR, 10, 5.60),
        (DEAR, 30, 6.46),
        (DEAR, 100, 7.37),
    ],
)
def test_selection_by_profiles_costs_the_reference_values(run, mean, epsilon):
    cap = ProfileCap.over([run], mean, DELTA)
    assert cap.epsilon == pytest.approx(epsilon, abs=0.01)
    assert cap.admits(run)
    assert not cap.admits(Run(0.02, 0.999 * run.noise_multiplier, 2500))
    found, proof = find_selection_cap([run], mean, DELTA)
    assert (found, proof) == (cap.epsilon, cap)
    assert selection_epsilon(cap, mean, DELTA) == (found, "privacy profiles")


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Profile of N(0, 1) against N(mu, 1) (Balle and Wang 2018, theorem 8)."""
    log_tail = epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(log_tail)


def test_profile_of_one_gaussian_step_is_the_closed_form_from_above():
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        exact = gaussian_delta(0.5, epsilon)
        found = profile_delta(Run(1.0, 2.0, 1), epsilon)
        assert exact * (1 - 1e-9) <= found <= exact * 1.01
    assert profile_delta(Run(1.0, 0.0, 1), 9.0) == 1.0


def test_best_of_gaussians_by_their_own_output_costs_less_than_both_proofs_say():
    """The mechanism releases x + N(0, 1), which is its own score; x is 0 or mu.

    The density of the best is f'(Phi(y - x)) phi(y - x), with f' = g / (1 - (1 - g) s)^2 and
    g = 1/m. So the exact epsilon is where the hockey-stick divergence, integrated, is delta.
    """
    mu, mean = 0.5, 10
    gamma = 1 / mean

    def density(y, x):
        slope = gamma / (gamma + (1 - gamma) * stats.norm.sf(y - x)) ** 2
        return slope * stats.norm.pdf(y - x)

    grid = np.linspace(-12, 14, 200_001)
    at_0, at_mu = density(grid, 0.0), density(grid, mu)
    assert integrate.trapezoid(at_0, grid) == pytest.approx(1, abs=1e-9)

    def delta(epsilon):
        both = (at_0 - math.exp(epsilon) * at_mu, at_mu - math.exp(epsilon) * at_0)
        return max(integrate.trapezoid(np.maximum(d, 0), grid) for d in both)

    low, high = 0.0, 10.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    run = Run(1.0, 1 / mu, 1)
    profiles = ProfileCap.over([run], mean, DELTA).epsilon
    renyi = total_epsilon("private_selection", Cap.over([run]), mean, DELTA)[0]
    assert (high, profiles, renyi) == pytest.approx((2.25, 3.15, 4.32), abs=0.006)


def test_a_cap_over_several_runs_is_two_epsilons_that_admit_them_all():
    runs = [CHEAP, Run(0.1, 4.145, 300)]
    cap = ProfileCap.over(runs, 10, DELTA)
    assert all(cap.admits(run) for run in runs)
    assert cap.epsilon > max(ProfileCap.over([run], 10, DELTA).epsilon for run in runs) - 1e-9
    # What each limit says is what the theorem asks for at its epsilon.
    (first, second), (near_1, near_2) = cap.epsilons, cap.limits
    assert near_1 == pytest.approx(math.expm1(first) / 9)
    assert near_2 == pytest.approx(DELTA / 10)
    assert cap.epsilon == second + 2 * first
    wide = ProfileCap.over(runs, 10, DELTA, margin=0.01)
    assert wide.epsilon == pytest.approx(1.01 * cap.epsilon)


def test_least_noise_of_a_cap_is_let_through_and_less_is_not():
    cap = ProfileCap.over([DEAR], 30, DELTA)
    sigma = cap.noise(2500, 0.02)
    assert sigma == pytest.approx(1.376, rel=1e-4)
    assert cap.admits(Run(0.02, sigma, 2500))
    other = cap.noise(300, 0.1)
    assert cap.admits(Run(0.1, other, 300))
    assert not cap.admits(Run(0.1, 0.999 * other, 300))


def test_one_run_alone_costs_what_it_costs_and_no_noise_costs_everything():
    assert ProfileCap.over([DEAR], 1, DELTA).epsilon == pytest.approx(
        DEAR.epsilon(DELTA), abs=0.003
    )
    assert ProfileCap.over([Run(0.02, 0.0, 10)], 5, DELTA).epsilon == math.inf
    assert find_selection_cap([Run(0.02, 0.0, 10)], 5, DELTA)[0] == math.inf


def test_selection_at_little_epsilon_is_counted_on_a_grid_of_its_own():
    """On the grid of epsilon 1 the best of 30 runs of epsilon 0.1 cost 0.238."""
    run, _ = calibrate_noise(0.1, DELTA, 0.02, 2500)
    assert ProfileCap.over([run], 30, DELTA).epsilon == pytest.approx(0.2122, abs=5e-4)
