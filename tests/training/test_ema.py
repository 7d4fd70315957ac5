"""The average over the iterates is what its formula says, is what is measured, and is kept."""

import pytest
import torch

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import InvalidKey
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Tensors
from dpsweep.training.assemble import assemble_step, check_fit, initial_params
from dpsweep.training.evaluate import evaluate
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

EMA = 0.7


def config(model: dict | None = None, **keys: object) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": model or {"name": "cnn_small", "width": 2},
            "privacy": {"noise_multiplier": 1.0},
            "train": {"batch_size": 479, "epochs": 2, "device": "cpu", "dtype": "float64", **keys},
            "optimizer": {"lr": 1.0},
            "method": {"name": "disk"},
        }
    )


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "ema")


def iterates(trial: TrialConfig, steps: int) -> tuple[list[Tensors], Tensors]:
    """The iterate after each step, and what is kept after the last."""
    step = assemble_step(trial, Secret.fixed("ema"), torch.device("cpu"))
    progress, seen = step.start(initial_params(step)), []
    for _ in range(steps):
        step(progress)
        seen.append({k: x.detach().clone() for k, x in progress.params.items()})
    return seen, progress.result


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_average_weighs_each_iterate_by_its_age_and_forgets_the_start(steps):
    seen, average = iterates(config(ema=EMA), steps)
    weights = [EMA ** (steps - 1 - s) for s in range(steps)]
    for k, x in average.items():
        expected = sum(w * it[k] for w, it in zip(weights, seen, strict=True)) / sum(weights)
        torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-14)


def test_average_changes_no_iterate():
    with_it, without = iterates(config(ema=EMA), 4)[0], iterates(config(), 4)
    for one, other in zip(with_it, without[0], strict=True):
        assert all(torch.equal(one[k], other[k]) for k in one)
    assert all(torch.equal(without[1][k], without[0][-1][k]) for k in without[1])


def trained(trial: TrialConfig, trial_dir: TrialDir) -> list[dict[str, float]]:
    trial_dir.make_secret()
    return train(trial, trial_dir, lambda row: None).rows


def test_average_is_measured_and_kept_and_said_to_be_one(tmp_path):
    trial, trial_dir = config(ema=EMA), TrialDir(tmp_path / "one")
    rows = trained(trial, trial_dir)
    weights = torch.load(trial_dir.weights, weights_only=True)
    step = assemble_step(trial, Secret.fixed("x"), torch.device("cpu"))
    score = evaluate(step.engine.model, weights, step.data, torch.float64)
    assert rows[-1]["valid/loss"] == score["loss"]
    last = trial_dir.load()["progress"]["iterates"][-1]
    assert any((weights[k] != x).any() for k, x in last.items())
    said = (trial_dir.path / "weights.txt").read_text()
    assert said == (
        "An average over the iterates of 6 steps, with train.ema 0.7; not the last iterate.\n"
    )
    plain = TrialDir(tmp_path / "plain")
    trained(config(), plain)
    assert not (plain.path / "weights.txt").exists()


def test_frozen_weights_are_kept_beside_the_trained_ones_and_start_another_trial(tmp_path):
    model = {"name": "cnn_small", "width": 2, "train": ["7"]}
    trial_dir = TrialDir(tmp_path / "frozen")
    trained(config(model), trial_dir)
    weights = torch.load(trial_dir.weights, weights_only=True)
    start = assemble_step(config(model), Secret.fixed("x"), torch.device("cpu")).uncut_model
    assert list(weights) == ["0.weight", "0.bias", "3.weight", "3.bias", "7.weight", "7.bias"]
    assert torch.equal(weights["0.weight"], start[0].weight.double())
    assert (weights["7.weight"] != start[7].weight).any()
    again = {"name": "cnn_small", "width": 2, "weights": str(trial_dir.weights)}
    model = assemble_step(config(again), Secret.fixed("x"), torch.device("cpu")).engine.model
    torch.testing.assert_close(model[7].weight.detach(), weights["7.weight"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("ema", [0.0, 1.0, -0.1])
def test_decay_outside_the_open_interval_is_refused(ema):
    with pytest.raises(ValueError, match="ema"):
        config(ema=ema)


def test_shift_beyond_the_data_s_images_is_found_before_the_first_step():
    with pytest.raises(InvalidKey, match="8 pixels, of images of 8 x 8") as caught:
        check_fit(config(augment={"crops": 8}))
    assert caught.value.key == "train.augment.crops"


def test_unused_keys_stay_out_of_a_trial_s_identity():
    written = config().model_dump_json()
    for key in ("augment", "ema", "weights", "fresh", "standardise", "normalise", "num_train"):
        assert f'"{key}"' not in written
    assert '"augment"' in config(augment={"flips": True}).model_dump_json()
