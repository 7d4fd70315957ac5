"""A config's sampling rate, steps, noise and epsilon are those its numbers say."""

import math

import pytest

from dpsweep.config.plan import plan_privacy
from dpsweep.config.trial import TrialConfig
from dpsweep.privacy.accounting import Run

N = 1437


def trial(*, data: dict | None = None, **privacy: object) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits", **(data or {})},
            "model": {"name": "cnn_small"},
            "privacy": privacy or {"noise_multiplier": 1.2, "clip_norm": 0.5},
            "train": {"batch_size": 100, "epochs": 10},
            "optimizer": {"lr": 1.0},
            "method": {"name": "dp_sgd"},
        }
    )


def with_train(config: TrialConfig, **train: object) -> TrialConfig:
    new = config.train.model_copy(update=train)
    return config.model_copy(update={"train": new})


def test_rate_is_the_expected_batch_over_the_private_examples():
    assert trial().steps_and_rate == (144, 100 / N)


def test_held_out_examples_are_not_counted():
    config = trial(data={"validation": "holdout", "holdout_fraction": 0.2})
    assert config.data.num_examples == N - 287
    steps, rate = config.steps_and_rate
    assert rate == 100 / (N - 287)
    assert steps == round(10 * (N - 287) / 100)
    assert config.delta == (N - 287) ** -1.1


@pytest.mark.parametrize(
    ("epochs", "batch_size", "steps"), [(0.001, 100, 1), (1, N, 1), (0.5, 1, 718), (3, 479, 9)]
)
def test_run_takes_the_nearest_whole_number_of_steps_and_at_least_one(epochs, batch_size, steps):
    config = with_train(trial(), epochs=epochs, batch_size=batch_size)
    assert config.steps_and_rate[0] == steps


def test_delta_is_the_given_one_or_the_default_power():
    assert trial(noise_multiplier=1.0, delta=1e-7).delta == 1e-7
    assert trial(noise_multiplier=1.0).delta == N**-1.1


def test_given_noise_is_kept_and_counted():
    plan = plan_privacy(trial())
    assert plan.run == Run(100 / N, 1.2, 144)
    assert plan.epsilon == plan.run.epsilon(N**-1.1)


def test_no_noise_is_no_privacy():
    assert plan_privacy(trial(noise_multiplier=0)).epsilon == math.inf


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_given_epsilon_is_promised_by_the_noise(epsilon):
    plan = plan_privacy(trial(epsilon=epsilon))
    assert epsilon - 0.01 <= plan.epsilon <= epsilon
    assert plan.run.epsilon(plan.delta) == pytest.approx(epsilon, abs=0.01)


def test_an_epoch_is_over_at_the_first_step_past_it_and_the_last_at_the_last():
    plan = plan_privacy(trial())
    assert [plan.step_after(epoch) for epoch in (1, 2, 9, 10, 99)] == [15, 29, 130, 144, 144]
