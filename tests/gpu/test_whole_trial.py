"""Whole trials on the virtual GPU, the way that a worker trains them."""

import gc

import pytest
import torch
from digits import digits_trial, make_trial_dir, read_weights
from steps import World, one_step
from virtual import GIB, virtual_gpu

from dpsweep.config.resources import ResourcesConfig
from dpsweep.core.seeds import Secret
from dpsweep.execution.resources import get_memory_share
from dpsweep.training import loop
from dpsweep.training import step as step_module
from dpsweep.training.allowance import Allowance
from dpsweep.training.assemble import assemble_step, initial_params
from dpsweep.training.device import open_device
from dpsweep.training.loop import Paused, train

METHODS = [
    {"name": "dp_sgd"},
    {"name": "disk"},
    {"name": "fftkf", "predictor": "split"},
    {"name": "dp_adam"},
    {"name": "dp_pmlf", "points": 3},
    {"name": "dp_adambc"},
    {"name": "bandmf", "bands": 3},
    {"name": "dp_ftrl", "buffers": 2},
]

LIKE_OTHERS = ("dp_pmlf", "dp_adambc")


def trial(method, **train_settings):
    return digits_trial(method, device="cuda", **train_settings)


# Of two methods with state of one kind (iterates, Adam's moments) the second is slow.
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, id=m["name"], marks=[pytest.mark.slow] if m["name"] in LIKE_OTHERS else [])
        for m in METHODS
    ],
)
def test_pausing_on_cuda_and_going_on_changes_no_bit(tmp_path, method, monkeypatch):
    monkeypatch.setattr(loop, "_LOOK_SECONDS", -1.0)  # look between any two steps
    monkeypatch.setattr(step_module, "_FEWEST_DRAWN_BY_A_THREAD", 1)
    config, rows = trial(method), []
    whole = make_trial_dir(tmp_path / "whole")
    paused = make_trial_dir(tmp_path / "paused", like=whole)
    pause_at_step_three = iter([False] * 2 + [True] + [False] * 100)

    def should_pause():
        return next(pause_at_step_three)

    with virtual_gpu() as gpu:
        train(config, whole, rows.append, allowance=Allowance(gpu_share=0.25))
        assert gpu.fraction == 0.25
        uninterrupted = set(gpu.waits)
        with pytest.raises(Paused):
            train(config, paused, lambda row: None, should_pause)
        gpu.restart()
        train(config, paused, lambda row: None, should_pause)
        assert gpu.fraction == 1.0  # a smaller share is not left to the next trial
    assert [row["epoch"] for row in rows] == [1]
    assert gpu.launches
    assert gpu.mixed == []
    for name, tensor in read_weights(whole).items():
        assert torch.equal(read_weights(paused)[name], tensor), name
    # the optimizer's step counts stay on the CPU, where torch keeps them: to read one waits
    new = set(gpu.waits) - uninterrupted
    assert not [wait for wait in new if not wait.startswith("copy to the device")]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m["name"])
def test_steps_on_cuda_are_those_on_a_cpu(method):
    config = trial(method, dtype="float64")

    def after_three_steps(device):
        step = assemble_step(config, Secret.fixed("test"), open_device(device))
        progress = step.start(initial_params(step))
        for _ in range(3):
            step(progress)
        return progress.params

    on_cpu = after_three_steps("cpu")
    with virtual_gpu():
        on_cuda = after_three_steps("cuda")
    for name, tensor in on_cpu.items():
        torch.testing.assert_close(on_cuda[name], tensor, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", METHODS[:2], ids=lambda m: m["name"])
def test_a_trial_leaves_nothing_on_the_card(tmp_path, method):
    with virtual_gpu() as gpu:
        train(
            trial(method), make_trial_dir(tmp_path / "warm"), lambda row: None
        )  # torch's own caches
        gc.collect()
        held = gpu.held
        gc.disable()  # what waits for the collector takes memory of the next trial
        try:
            train(trial(method), make_trial_dir(tmp_path / "second"), lambda row: None)
            assert gpu.held == held
        finally:
            gc.enable()


def test_two_trials_at_fractions_of_a_card_fit_it_together():
    world, share = World("dp_sgd", "cnn5", 4096), get_memory_share(ResourcesConfig(gpu=0.5))
    half = one_step(world, total=2 * GIB, gpu_share=share)
    assert half.fraction == share == 0.45
    assert 2 * half.peak <= 0.9 * 2 * GIB
    assert half.physical < 4096
