"""Several virtual cards share the batches of a trial, with the bits of one."""

import json
from unittest import mock

import pytest
import torch
from digits import digits_trial, make_trial_dir, read_weights
from typer.testing import CliRunner
from virtual import virtual_gpu

from dpsweep.cli import app
from dpsweep.core.errors import ConfigError
from dpsweep.training import loop
from dpsweep.training import step as step_module
from dpsweep.training.allowance import Allowance
from dpsweep.training.device import open_device
from dpsweep.training.loop import Paused, train
from dpsweep.training.release_check import check_releases

METHODS = [
    {"name": "dp_sgd"},
    {"name": "disk"},
    {"name": "bandmf", "bands": 3},
    {"name": "block_spectral_dp"},
]
SHARED = Allowance(gpu_share=0.5, num_devices=3)


def trial(method, **settings):
    return digits_trial(method, device="cuda", **{"max_physical_batch": 50} | settings)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["name"])
def test_three_cards_release_the_bits_of_one_also_after_a_pause(tmp_path, method, monkeypatch):
    monkeypatch.setattr(loop, "_LOOK_SECONDS", -1.0)  # look between any two steps
    monkeypatch.setattr(step_module, "_FEWEST_DRAWN_BY_A_THREAD", 1)
    config = trial(method, epochs=0.6)  # three steps, with the pause among them
    one = make_trial_dir(tmp_path / "one")
    three, paused = (make_trial_dir(tmp_path / name, like=one) for name in ("three", "paused"))
    pause_at_step_two = iter([False, True] + [False] * 100)
    with virtual_gpu() as gpu:
        train(config, one, lambda row: None)
        alone = gpu.copies["up"]
    with virtual_gpu(num_cards=3) as gpu:
        train(config, three, lambda row: None, allowance=SHARED)
        assert gpu.mixed == gpu.unordered == []
        assert gpu.fractions == {0: 0.5, 1: 0.5, 2: 0.5}
        assert min(gpu.work[i] for i in range(3)) > 0.1 * gpu.work[0]
        assert gpu.copies["across"]
        # noise is drawn and copied to a card as often as for one: once a step
        noise = max(alone)
        assert gpu.copies["up"].count(noise) == alone.count(noise)
        with pytest.raises(Paused):
            train(config, paused, lambda row: None, lambda: next(pause_at_step_two), None, SHARED)
        train(config, paused, lambda row: None, allowance=SHARED)
        assert gpu.mixed == []
    for name, tensor in read_weights(one).items():
        assert torch.equal(read_weights(three)[name], tensor), name
        assert torch.equal(read_weights(paused)[name], tensor), name


def test_the_first_card_holds_most(tmp_path):
    with virtual_gpu(num_cards=3) as gpu:
        train(
            trial({"name": "dp_adam"}, max_physical_batch="auto"),
            make_trial_dir(tmp_path / "trial"),
            lambda row: None,
            allowance=SHARED,
        )
    assert 0 < gpu.peaks[1] <= gpu.peaks[0]
    assert 0 < gpu.peaks[2] <= gpu.peaks[0]


def test_a_tensor_of_another_card_is_refused_as_one_of_the_host_is():
    """The watch itself: an operation on two cards is noted."""
    with virtual_gpu(num_cards=2) as gpu:
        one, two = (torch.ones(3, device=f"cuda:{i}") for i in range(2))
        assert (one + one).device == torch.device("cuda", 0)
        assert gpu.mixed == []
        assert (one + two.to(one.device)).device == torch.device("cuda", 0)
        assert gpu.mixed == []
        torch.add(one, two)
        assert len(gpu.mixed) == 1


def test_checks_before_the_first_trial_run_on_all_cards():
    with virtual_gpu(num_cards=2) as gpu:
        found = check_releases(trial({"name": "dp_sgd"}), 0.1, num_devices=2)
        assert gpu.work[1]
        assert gpu.mixed == []
    assert all(check.holds for check in found)


def test_too_few_cards_are_refused():
    with virtual_gpu(num_cards=2):
        assert open_device("cuda", num_devices=2) == torch.device("cuda", 0)
        with pytest.raises(ConfigError, match=r"resources\.gpu: 3, and torch sees 2 in this proc"):
            open_device("cuda", num_devices=3)


def test_cards_of_several_kinds_are_refused():
    with virtual_gpu(num_cards=2):
        kinds = mock.patch.object(torch.cuda, "get_device_name", lambda device: f"kind {device}")
        with kinds, pytest.raises(ConfigError, match=r"of several kinds: kind cuda:0, kind cuda:1"):
            open_device("cuda", num_devices=2)


def run_doctor():
    result = CliRunner().invoke(app, ["doctor", "--gpu", "--json"])
    return {row["check"]: row for row in json.loads(result.output)}, result.exit_code


def test_doctor_compares_two_cards_with_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with virtual_gpu(num_cards=2) as gpu:
        found, code = run_doctor()
        assert gpu.work[1]
    assert code == 0
    assert found["gpu batch sharing"]["level"] == "ok"


def test_doctor_warns_of_cards_of_several_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        virtual_gpu(num_cards=2),
        mock.patch.object(torch.cuda, "get_device_name", lambda device=None: f"kind {device}"),
    ):
        found, code = run_doctor()
    assert code == 0
    assert found["gpu batch sharing"]["level"] == "warn"
    assert "of several kinds" in found["gpu batch sharing"]["words"]
