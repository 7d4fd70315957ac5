"""The noise of a method, as a file says it: what is read, and what is refused with which words."""

import pytest
from pydantic import ValidationError

from dpsweep.config.plan import plan_privacy
from dpsweep.config.source import Source
from dpsweep.config.trial import TrialConfig, dump_trial, load_trial
from dpsweep.methods.correlated import Bands
from dpsweep.privacy.correlated import INDEPENDENT, Banded, Buffered


def trial(method, **changes):
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small"},
            "privacy": {"epsilon": 4.0},
            "train": {"batch_size": 100, "epochs": 3},
            "optimizer": {"lr": 1.0},
            "method": method,
            **changes,
        }
    )


def test_noise_is_a_part_of_a_method_and_independent_by_default():
    assert trial({"name": "dp_sgd"}).noise == INDEPENDENT
    assert trial({"name": "bandmf"}).noise == Banded("auto")
    assert trial({"name": "bandmf", "bands": 4, "coefficients": "sqrt"}).noise == Banded(4, "sqrt")
    assert trial({"name": "dp_ftrl", "buffers": 1}).noise == Buffered(1)
    composed = {"compose": {"noise": {"name": "banded", "bands": 4}, "base": "adam"}}
    assert trial(composed, optimizer={"lr": 0.01}).noise == Banded(4)


def test_config_without_the_key_is_written_as_before():
    assert "noise" not in dump_trial(trial({"compose": {"base": "sgd"}}))
    config = trial({"compose": {"noise": {"name": "banded", "bands": 4}}})
    assert "bands: 4" in dump_trial(config)


def test_given_coefficients_give_the_bands():
    config = trial({"name": "bandmf", "coefficients": [3, 2, 2]})
    assert config.noise == Banded(3, (3.0, 2.0, 2.0))
    assert plan_privacy(config).correlation.coefficients == pytest.approx(
        [x / 17**0.5 for x in (3, 2, 2)]
    )


@pytest.mark.parametrize(
    ("method", "changes", "match"),
    [
        ({"name": "bandmf", "bands": 15}, {}, "exceed the 1437 private examples.*at most 14"),
        (
            {"name": "bandmf", "bands": 4},
            {"train": {"batch_size": 100, "epochs": 0.2}},
            "4 bands are more than the 3 steps",
        ),
        (
            {"name": "bandmf", "bands": 4},
            {"privacy": {"epsilon": 4.0, "clipping": "adaptive"}},
            "adaptive changes the clip norm from step to step",
        ),
        (
            {"name": "dp_ftrl"},
            {"privacy": {"epsilon": 4.0, "clipping": "adaptive"}},
            "takes back noise of the steps before",
        ),
        ({"name": "bandmf", "workload": "momentum"}, {}, "the base optimizer has none"),
        ({"name": "bandmf", "coefficients": [1, 2]}, {}, "must begin above 0 and not increase"),
        ({"name": "bandmf", "coefficients": [0, 0]}, {}, "must begin above 0 and not increase"),
        ({"name": "bandmf", "coefficients": []}, {}, "must begin above 0 and not increase"),
        ({"name": "bandmf", "bands": 3, "coefficients": [2, 1]}, {}, "3 bands, got 2"),
        ({"name": "bandmf", "bands": 0}, {}, "greater than or equal to 1"),
        ({"name": "dp_ftrl", "buffers": 9}, {}, "less than or equal to 3"),
        (
            {"compose": {"noise": {"name": "banded", "bands": 15}}},
            {},
            "exceed the 1437 private examples",
        ),
    ],
)
def test_noise_that_does_not_fit_is_refused(method, changes, match):
    with pytest.raises(ValidationError, match=match):
        trial(method, **changes)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ({"name": "bandmf", "bands": 15}, "method.bands"),
        ({"compose": {"noise": {"name": "banded", "bands": 15}}}, "method.compose.noise.bands"),
    ],
)
def test_refusal_names_the_key(method, key):
    tree = trial({"name": "dp_sgd"}).model_dump(mode="json", exclude_none=True) | {"method": method}
    with pytest.raises(Exception, match=key):
        load_trial(Source("a.yaml", tree, {}))


def test_auto_is_a_number_in_the_plan_and_on_request():
    config = trial({"name": "bandmf"}, privacy={"epsilon": 8.0})
    bands = config.with_own_bands().method.bands
    assert bands >= 2
    assert plan_privacy(config).correlation.cycle == bands
    composed = trial({"compose": {"noise": {"name": "banded"}}}, privacy={"epsilon": 8.0})
    assert composed.with_own_bands().method.compose.noise.bands == bands
    assert config.with_own_bands().steps_and_rate == config.steps_and_rate
    assert Bands(bands=2).banded == Banded(2)


def test_length_of_a_run_and_its_default_step_do_not_depend_on_the_noise():
    plain, banded = trial({"name": "dp_sgd"}), trial({"name": "bandmf", "bands": 4})
    assert banded.num_steps == plain.num_steps == plain.steps_and_rate[0] == 43
    assert banded.steps_and_rate == (11, 400 / 1437)
    assert banded.total_step == plain.total_step
    assert plan_privacy(banded).step_after(1) == plan_privacy(plain).step_after(1)
