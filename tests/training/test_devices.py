"""A trial on several devices releases the bits of one device with the same portions.

On CPUs, where each device is a thread with a model of its own; tests/gpu has virtual cards.
"""

import pytest
import torch
from digits import digits_trial, make_trial_dir, read_weights

from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import Secret
from dpsweep.privacy.engine.parallel import DataParallelEngine
from dpsweep.training import loop
from dpsweep.training.allowance import Allowance
from dpsweep.training.assemble import assemble_step
from dpsweep.training.device import list_devices
from dpsweep.training.loop import Paused, train

CPU = torch.device("cpu")
SGD = {"name": "dp_sgd"}
METHODS = [
    SGD,
    {"name": "disk"},
    {"name": "fftkf", "predictor": "split"},
    {"name": "bandmf", "bands": 3},
    {"name": "block_spectral_dp"},
]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m["name"])


@every_method
def test_weights_have_the_bits_of_one_device_also_after_a_pause(tmp_path, method, monkeypatch):
    monkeypatch.setattr(loop, "_LOOK_SECONDS", -1.0)  # look between any two steps
    config = digits_trial(method, max_physical_batch=50)
    alone = make_trial_dir(tmp_path / "alone")
    whole, paused = (make_trial_dir(tmp_path / name, like=alone) for name in ("whole", "paused"))
    pauses = iter([False, True] + [False] * 100)
    several = Allowance(num_devices=3)
    rows, shared = [], []
    train(config, alone, rows.append)
    train(config, whole, shared.append, allowance=several)
    with pytest.raises(Paused):
        train(config, paused, lambda row: None, lambda: next(pauses), allowance=several)
    train(config, paused, lambda row: None, allowance=several)
    for name, tensor in read_weights(alone).items():
        assert torch.equal(read_weights(whole)[name], tensor), name
        assert torch.equal(read_weights(paused)[name], tensor), name
    assert [row | {"seconds": 0} for row in shared] == [row | {"seconds": 0} for row in rows]


def engine_of(config, **allowance):
    return assemble_step(config, Secret.fixed("test"), CPU, allowance=Allowance(**allowance)).engine


@pytest.mark.parametrize(("physical", "at_once"), [("auto", 84), (1000, 84), (60, 60)])
def test_no_device_waits_for_another_s_large_portion(physical, at_once):
    engine = engine_of(digits_trial(SGD, max_physical_batch=physical), num_devices=4)
    assert isinstance(engine, DataParallelEngine)
    assert engine.max_physical_batch == at_once  # 300 + 2 sqrt(300) examples in four parts, or less
    halved = engine_of(digits_trial(SGD, max_physical_batch=physical), num_devices=4, halvings=1)
    assert halved.max_physical_batch == at_once // 8 * 4


def test_a_frozen_part_is_computed_once_for_all_devices():
    config = digits_trial(SGD, model={"train": ["7"]})
    step = assemble_step(config, Secret.fixed("test"), CPU, allowance=Allowance(num_devices=2))
    assert step.uncut_model is not None
    assert len(step.engine.replicas) == 2


def test_devices_are_counted_from_the_first():
    cuda = torch.device("cuda", 0)
    assert list_devices(cuda, 3) == [torch.device("cuda", i) for i in range(3)]
    assert list_devices(CPU, 2) == [CPU, CPU]


def test_a_memory_in_a_closure_of_one_device_s_model_ends_the_trial_unreported(
    tmp_path, monkeypatch
):
    memory, real = [], loop.assemble_step

    def remember(*args):
        step = real(*args)
        second = step.engine.replicas[1].model
        second.register_forward_hook(lambda _, inputs, output: output + len(memory))
        steps = step.engine.replicas[1]._portion

        def portion(*args):
            memory.append(None)
            return steps(*args)

        object.__setattr__(step.engine.replicas[1], "_portion", portion)
        return step

    monkeypatch.setattr(loop, "assemble_step", remember)
    rows = []
    with pytest.raises(ConfigError, match="another answer when it is asked the same again"):
        train(
            digits_trial(SGD),
            make_trial_dir(tmp_path),
            rows.append,
            allowance=Allowance(num_devices=2),
        )
    assert rows == []
