"""Every runner takes the step that it says it takes."""

import warnings
from dataclasses import replace

import pytest
import race
import torch
from race import (
    PEERS,
    FixedBatchStep,
    Race,
    compute_ratios,
    make_runner,
    measure_medians,
    measure_peak_bytes,
)

from dpsweep.core.errors import ConfigError
from dpsweep.methods import PUBLISHED
from dpsweep.privacy.engine.opacus import OpacusEngine
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.training.malloc import keep_freed_memory

DIGITS = Race("digits", {"name": "cnn_small", "width": 5, "block": 10}, 16)
DENSE = Race("digits", {"name": "cnn_small", "width": 4}, 16)


@pytest.fixture(autouse=True)
def opacus_may_warn():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


@pytest.mark.parametrize("method", PUBLISHED)
def test_a_method_takes_a_step_that_moves_its_weights(method):
    take = make_runner(DIGITS, method)
    (progress,) = take.args
    before = {k: x.clone() for k, x in progress.params.items()}
    take()
    assert progress.step == 1
    assert all(not torch.equal(x, before[k]) for k, x in progress.params.items())


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_takes_a_step_that_moves_its_weights(name):
    take = make_runner(DENSE, name)
    model = take.args[1]
    before = [p.detach().clone() for p in model.parameters()]
    take()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_engine_is_the_one_named():
    assert isinstance(make_runner(DENSE, "disk@vmap").func.engine, VmapEngine)
    engine = make_runner(DENSE, "disk@opacus").func.engine
    assert isinstance(engine, OpacusEngine)
    assert engine.max_physical_batch == 24  # a whole batch, as Opacus' users do


def test_fixed_batches_have_one_size_and_poisson_ones_have_not():
    fixed, poisson = make_runner(DENSE, "dp_sgd@fixed").func, make_runner(DENSE, "dp_sgd").func
    assert isinstance(fixed, FixedBatchStep)
    assert {len(fixed.batch(t)) for t in range(20)} == {16}
    assert len({len(poisson.batch(t)) for t in range(20)}) > 3
    assert all(fixed.batch(t).max() < len(fixed.data.targets) for t in range(20))


def test_noise_of_a_cipher_is_a_runner_of_its_own():
    assert make_runner(DENSE, "dp_sgd@secure").func.config.privacy.noise.source == "secure"
    assert make_runner(DENSE, "dp_sgd").func.config.privacy.noise.source == "fast"


def test_an_unknown_runner_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"step.py.*dp_sgdd.*dp_sgd"):
        make_runner(DENSE, "dp_sgdd")


def test_a_runner_carries_settings_of_its_own():
    step = make_runner(DENSE, "innerouter:points=3:beta=0.5@fixed").func
    assert isinstance(step, FixedBatchStep)
    assert step.config.method.points == 3
    assert step.config.method.decay == 0.5
    assert isinstance(make_runner(DENSE, "innerouter:k=3@vmap").func.engine, VmapEngine)
    nested = make_runner(DENSE, "compose:compose.query.name=momentum:compose.query.points=3").func
    assert nested.config.method.compose.query.points == 3


def test_a_runners_own_setting_wins_over_that_of_all():
    race = replace(DENSE, settings=("method.points=4", "method.decay=0.5"))
    method = make_runner(race, "innerouter:points=3").func.config.method
    assert (method.points, method.decay) == (3, 0.5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "innerouter:pionts=3",
            r"innerouter:pionts=3: unknown key of innerouter.*'points'",
        ),
        ("innerouter:points", r"innerouter:points: 'points' is not KEY=VALUE.*innerouter:points=3"),
        ("innerouter:points=", r"'points=' is not KEY=VALUE"),
        ("innerouter:", r"'' is not KEY=VALUE"),
        (
            "innerouter:points=33",
            r"step.py: innerouter:points=33: method.points: must be at most 16",
        ),
        ("dp_sgd:points=3", r"dp_sgd:points=3: dp_sgd has no keys. Use dp_sgd alone"),
        ("sgd:points=3", r"sgd:points=3: sgd is not ours and has no settings. Use sgd alone"),
        ("innerouter:points=3@opacsu", r"train.engine: must be one of .*'opacsu'"),
    ],
)
def test_a_setting_that_a_runner_does_not_take_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        make_runner(DENSE, name)


def test_a_setting_of_all_that_one_runner_has_not_names_the_way_to_set_it_for_others():
    race = replace(DENSE, settings=("method.points=3",))
    with pytest.raises(
        ConfigError, match=r"--set method.points=3: .*dp_sgd has no points.*innerouter:points=3"
    ):
        make_runner(race, "dp_sgd")
    race = replace(DENSE, settings=("method.pionts=3",))
    with pytest.raises(ConfigError, match=r"--set method.pionts: unknown key. Did you mean"):
        make_runner(race, "innerouter")


def test_runners_take_turns_and_the_first_round_does_not_count():
    calls: list[str] = []
    takes = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    seconds = measure_medians(takes, 3, lambda: None)
    assert calls == list("ab" * 4)
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_ratios_are_of_medians():
    assert compute_ratios({"a": [1, 2, 90], "b": [3, 3, 0]}, "a") == {"a": 1, "b": 1.5}


@pytest.mark.slow
def test_opacus_holds_more_memory_than_we_do():
    large = Race("mnist", {"name": "cnn_small"}, 1024)
    assert measure_peak_bytes(large, "opacus") > 1.5 * measure_peak_bytes(large, "dp_sgd") > 0


def test_the_allocator_is_told_where_it_is_glibcs(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert not keep_freed_memory()


def test_no_example_is_read_from_a_file():
    data = race._data(Race("cifar10", {"name": "cnn5"}, 4))
    assert data.inputs.shape == (32, 3, 32, 32)
    assert data.inputs.dtype == torch.uint8
