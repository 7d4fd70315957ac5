"""What is wrong with a trial is found, and what it promises is said, before its first step."""

import numpy as np
import pytest

from dpsweep.config.plan import statement_of_trial
from dpsweep.config.source import Source
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.training.check import check_trial

FILE = Source("x.yaml", {}, {("data",): 2})


def trial(delta: float | str = "auto", **data: object) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits", **data},
            "model": {"name": "cnn_small"},
            "privacy": {"epsilon": 4.0, "delta": delta},
            "train": {"batch_size": 100, "epochs": 10},
            "optimizer": {"lr": 1.0},
            "method": {"name": "dp_sgd"},
        }
    )


@pytest.mark.parametrize("delta", ["auto", 1e-5, 1 / 1438])
def test_delta_below_one_in_n_is_no_cause_for_warning(delta):
    assert check_trial(trial(delta), FILE) == []


@pytest.mark.parametrize("delta", [1 / 1437, 1e-3, 0.5])
def test_delta_that_lets_one_example_be_published_is_warned_of(delta):
    (warning,) = check_trial(trial(delta), FILE)
    assert warning.startswith(f"privacy.delta: {delta:g} is not below 1 / num_examples = 0.0007")
    assert "Use delta: auto (0.00034)" in warning


def test_missing_data_are_told_with_file_and_line():
    config = trial(name="mnist", root="/nowhere")
    with pytest.raises(ConfigError, match=r"x\.yaml:2: data\.root: '/nowhere' does not hold mnist"):
        check_trial(config, FILE)


def test_data_that_are_not_as_declared_are_told_with_file_and_line(tmp_path):
    images, labels = np.zeros((130, 8, 8), np.uint8), np.arange(130) % 10
    np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    shape = {"shape": [1, 8, 8], "num_classes": 10, "num_train": 140, "num_test": 130}
    config = trial(name="npz", root=str(tmp_path / "x.npz"), **shape)
    with pytest.raises(
        ConfigError, match=r"x\.yaml:2: data\.num_train: 140, and x_train holds 130"
    ):
        check_trial(config, FILE)


def test_promise_counts_the_private_examples_and_names_those_left_out():
    config = trial(validation="holdout", holdout_fraction=0.2)
    words = statement_of_trial(config, epsilon=3.997, noise_multiplier=1.3)
    assert words.startswith("(4.00, 4.3e-04)-differentially private")
    assert "any one of 1150 training examples" in words
    assert "those 287 examples" in words


def test_promise_of_a_fixed_secret_is_void():
    assert statement_of_trial(trial(), epsilon=4.0, noise_multiplier=1.3, void=True).startswith(
        "VOID"
    )
