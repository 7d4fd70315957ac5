"""The audit sees what the real step loses: all of it where it is sound, more where it is not."""

import numpy as np
import pytest

import dpsweep.training.step
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.privacy.accounting import calibrate_noise
from dpsweep.privacy.audit import bound_epsilon, epsilon_of_mu, mu_of_epsilon
from dpsweep.privacy.history import NoiseHistory
from dpsweep.training.audit import Plan, _make_correlation, audit_one_run, sample_scores

DELTA = 1e-5


def config(**method: object) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small", "width": 5, "block": 10},
            "privacy": {"epsilon": 1.0},
            "train": {"batch_size": 8, "epochs": 1},
            "optimizer": {"lr": 1.0},
            "method": method,
        }
    )


METHODS = [
    ({"name": "dp_sgd"}, 150),
    ({"name": "disk", "kappa": 0.3}, 60),
    ({"name": "dp_adambc"}, 60),
    ({"name": "spectral_dp"}, 60),
    ({"name": "bandmf", "bands": 2}, 60),
]
"""And how many runs: of the parts that all share, one method's are seen more sharply."""


@pytest.mark.parametrize(("method", "runs"), METHODS, ids=[m["name"] for m, _ in METHODS])
def test_statistic_of_a_sound_step_is_that_of_two_normals_mu_apart(method, runs):
    plan = Plan(config(**method), epsilon=8.0, delta=DELTA)
    absent, present = sample_scores(plan, runs)
    mu = mu_of_epsilon(8.0, DELTA)  # two steps at q = 1 are one Gaussian mechanism
    # Means of draws of standard deviation mu, 5 standard errors: one false alarm in a million.
    slack = 5 * mu / np.sqrt(runs)
    assert absent.mean() == pytest.approx(-(mu**2) / 2, abs=slack)
    assert present.mean() == pytest.approx(mu**2 / 2, abs=slack)
    assert absent.std() == pytest.approx(mu, rel=5 / np.sqrt(2 * runs))


def test_statistic_of_buffered_noise_is_the_projection_on_what_the_canarys_group_shifts():
    """<shifts, whitened rows> over the whole run, since the buffers' columns have no end."""
    plan, runs = Plan(config(name="dp_ftrl"), epsilon=8.0, delta=DELTA), 60
    absent, present = sample_scores(plan, runs)
    found, (run, _) = _make_correlation(plan), calibrate_noise(8.0, DELTA, 1.0, plan.steps)
    column = found.column(found.steps)
    mus = []
    for group in range(found.cycle):
        shift = np.zeros(found.steps)
        for t in range(group, found.steps, found.cycle):
            shift[t:] += column[: found.steps - t]
        mus.append(np.linalg.norm(shift) / run.noise_multiplier)
    # the first group's part is the largest, and what the accountant counts
    assert max(mus) == mus[0] == pytest.approx(mu_of_epsilon(8.0, DELTA), rel=0.01)
    half, slack = np.square(mus).mean() / 2, 5 * mus[0] / np.sqrt(runs)
    assert absent.mean() == pytest.approx(-half, abs=slack)
    assert present.mean() == pytest.approx(half, abs=slack)
    assert not bound_epsilon("dp_ftrl", absent, present, 8.0, DELTA, 0.999).violated


@pytest.mark.parametrize("method", ["bandmf", "dp_ftrl"])
def test_white_noise_at_a_quarter_in_the_place_of_correlated_noise_is_caught(monkeypatch, method):
    monkeypatch.setattr(NoiseHistory, "correlate", lambda self, white, step: white / 4)
    extra = {"bands": 4} if method == "bandmf" else {}
    plan = Plan(config(name=method, **extra), epsilon=4.0, delta=DELTA)
    assert bound_epsilon(method, *sample_scores(plan, 60), 4.0, DELTA, 0.99).violated


@pytest.mark.parametrize("method", ["bandmf", "dp_ftrl"])
def test_one_run_refuses_correlated_noise_with_its_reason(method):
    with pytest.raises(ConfigError, match=r"canaries in every step\. Audit it by many runs"):
        audit_one_run(Plan(config(name=method)))


def test_two_steps_cost_what_the_accountant_says():
    run, _ = calibrate_noise(8.0, DELTA, 1.0, 2)
    assert epsilon_of_mu(np.sqrt(2) / run.noise_multiplier, DELTA) == pytest.approx(8.0, abs=0.02)


@pytest.mark.parametrize("share", [0.5])
def test_noise_that_is_scaled_down_after_it_was_added_is_caught(monkeypatch, share):
    sound = dpsweep.training.step.release

    def weakened(clipped, *, noise_multiplier, **rest):
        return sound(clipped, noise_multiplier=share * noise_multiplier, **rest)

    monkeypatch.setattr(dpsweep.training.step, "release", weakened)
    plan = Plan(config(name="dp_sgd"), epsilon=4.0, delta=DELTA)
    found = bound_epsilon("dp_sgd", *sample_scores(plan, 200), 4.0, DELTA, 0.99)
    assert found.violated
    assert found.lower > 4.5


def test_a_subsampled_step_loses_less_and_is_seen_to():
    plan = Plan(config(name="dp_sgd"), epsilon=4.0, delta=DELTA, sampling_rate=0.5, steps=1)
    absent, present = sample_scores(plan, 200)
    assert present.mean() > absent.mean()
    assert not bound_epsilon("dp_sgd", absent, present, 4.0, DELTA, 0.999).violated


@pytest.mark.parametrize("canary", ["bright", "black", "noise"])
def test_own_model_at_its_own_clip_norm_and_precision_holds(canary):
    plan = Plan(config(name="disk"), canary, own=True, epsilon=8.0, delta=DELTA)
    absent, present = sample_scores(plan, 40)
    mu = mu_of_epsilon(8.0, DELTA)
    # A gradient may be shorter than the clip norm, never longer; 5 standard errors.
    assert present.mean() <= mu**2 / 2 + 5 * mu / np.sqrt(40)
    assert not bound_epsilon("disk", absent, present, 8.0, DELTA, 0.999).violated


def test_one_run_holds_for_the_real_step_and_finds_a_twentieth_of_the_noise(monkeypatch):
    plan = Plan(config(name="dp_sgd"), epsilon=1.0, delta=DELTA, confidence=0.999)
    sound = audit_one_run(plan, 200)
    assert sound.canaries == 200
    assert sound.lower <= 1.0
    release = dpsweep.training.step.release

    def weakened(clipped, *, noise_multiplier, **rest):
        return release(clipped, noise_multiplier=noise_multiplier / 20, **rest)

    monkeypatch.setattr(dpsweep.training.step, "release", weakened)
    assert audit_one_run(plan, 200).lower > 1.0
