"""Less memory changes how a trial computes, and not what it draws, spends or releases."""

import pytest
import torch

from dpsweep.config.source import Source
from dpsweep.config.trial import load_trial
from dpsweep.core.seeds import Secret
from dpsweep.training.allowance import Allowance
from dpsweep.training.assemble import assemble_step
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

TRIAL = {
    "data": {"name": "digits"},
    "model": {"name": "cnn_small", "width": 4},
    "privacy": {"epsilon": 4},
    "train": {"batch_size": 128, "epochs": 1, "dtype": "float64"},
    "optimizer": {"lr": 1.0},
    "method": {"name": "fftkf"},
}


def trial(**settings):
    tree = {**TRIAL, "train": {**TRIAL["train"], **settings}}
    return load_trial(Source("trial.yaml", tree, {}))


def trained(config, place, monkeypatch, allowance, key):
    trial_dir = TrialDir(place)
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", key)
    trial_dir.make_secret()
    result = train(config, trial_dir, lambda row: None, allowance=allowance)
    return torch.load(trial_dir.weights, weights_only=True), result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("physical", ["auto", 100])
def test_half_the_examples_at_once_release_the_same_but_for_rounding(
    physical, tmp_path, monkeypatch
):
    config = trial(max_physical_batch=physical)
    whole, spent = trained(config, tmp_path / "a", monkeypatch, Allowance(), "one")
    half, spent_too = trained(config, tmp_path / "b", monkeypatch, Allowance(halvings=1), "one")
    other, _ = trained(config, tmp_path / "c", monkeypatch, Allowance(halvings=1), "another")
    assert spent.plan == spent_too.plan
    for name, tensor in whole.items():
        torch.testing.assert_close(half[name], tensor, rtol=1e-9, atol=1e-11)
    assert any(not torch.allclose(other[k], x, rtol=1e-3) for k, x in whole.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("physical", "halvings", "at_once"),
    [(100, 0, 100), (100, 1, 48), (100, 2, 24), (1000, 0, 152), (1000, 1, 72), (1, 1, 1)],
)
def test_what_is_halved_is_what_was_computed_at_once(physical, halvings, at_once, monkeypatch):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "x")
    config = trial(max_physical_batch=physical)
    trial_dir = assemble_step(
        config, Secret.for_new_trial(), torch.device("cpu"), allowance=Allowance(halvings=halvings)
    )
    assert trial_dir.engine.max_physical_batch == at_once
