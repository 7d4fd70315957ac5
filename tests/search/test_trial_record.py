"""Reading a trial back from Optuna."""

import optuna
import pytest

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import StateError
from dpsweep.search.trial_record import DISPATCHED, make_attributes, make_record

CONFIG = TrialConfig.model_validate(
    {
        "data": {"name": "digits"},
        "model": {"name": "linear"},
        "train": {"batch_size": 32, "epochs": 1},
        "optimizer": {"name": "sgd", "lr": 1.0},
        "method": {"name": "dp_sgd"},
        "privacy": {"epsilon": 1, "delta": 1e-5, "clip_norm": 1.0},
    }
)


def stored(**attrs):
    return optuna.trial.create_trial(value=1.0, user_attrs=attrs)


def test_what_it_was_charged_is_read_back():
    charged = {"sampling_rate": 0.1, "noise_multiplier": 2.0, "steps": 3}
    more = {DISPATCHED: {"void": True, "charged": charged}}
    record = make_record(stored(**make_attributes(CONFIG, {"optimizer.lr": 1.0}, **more)), CONFIG)
    assert (record.dispatched, record.void, record.charged) == (True, True, charged)
    assert record.hyperparams == {"optimizer.lr": 1.0}


def test_a_trial_of_an_older_version_is_refused():
    old = stored(knobs={}, config={}, handed_out={"void": False, "charged": {}})
    with pytest.raises(StateError, match=r"older than .* Finish that sweep with the version"):
        make_record(old, CONFIG)
