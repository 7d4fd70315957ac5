"""A best config at the end of a range is told with the range to try next, and no other is."""

from dataclasses import replace

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.results.edges import edge_warnings
from dpsweep.results.export import origin_of

SPACE = """search={optimizer.lr: {log_uniform: [0.25, 4]}, method.kappa: {uniform: [0.3, 1.0]},
    method.gamma: {uniform: [1, 3]}, train.batch_size: {log_integer: [64, 256]}}"""
INSIDE = {"optimizer.lr": 1.0, "method.kappa": 0.6, "method.gamma": 2.0, "train.batch_size": 128}


@pytest.fixture
def told(study_of):
    study = study_of([0.5], SPACE)
    record = study.record(0)

    def told(**at):
        drawn = {key.replace("_", ".", 1): value for key, value in at.items()}
        return edge_warnings(study.sweep, replace(record, hyperparams={**INSIDE, **drawn}))

    return told


def test_a_config_inside_is_no_cause_for_a_warning(told):
    assert told() == told(optimizer_lr=3.7) == told(method_gamma=2.9) == []


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (
            {"optimizer_lr": 3.99},
            "search.optimizer.lr: the best config has 3.99, at the upper end of [0.25, 4]; better "
            "ones may lie beyond it. Try next: {log_uniform: [1, 16]}",
        ),
        ({"optimizer_lr": 0.25}, "lower end of [0.25, 4]; .* next: {log_uniform: [0.0625, 1]}"),
        ({"method_gamma": 3.0}, "upper end of [1, 3]; .* next: {uniform: [2, 4]}"),
        ({"train_batch_size": 64}, "lower end of [64, 256]; .* next: {log_integer: [32, 128]}"),
    ],
)
def test_a_config_at_an_end_is_told_with_the_range_to_try_next(told, at, words):
    (said,) = told(**at)
    assert all(part in said for part in words.split(" .* "))


def test_an_end_that_is_the_keys_own_is_none(told):
    """The gain of a Kalman filter is at most 1."""
    assert told(method_kappa=1.0) == []


def test_the_next_range_can_be_searched(told, sweep_file):
    (said,) = told(optimizer_lr=3.99)
    spec = said.partition("Try next: ")[2]
    load_sweep(sweep_file, [f"search={{optimizer.lr: {spec}}}"])


def test_a_key_of_another_method_is_not_looked_at(study_of):
    space = """search={method: {each_of: [{name: disk, kappa: {uniform: [0.3, 0.5]}},
        {name: fftkf, kappa: {uniform: [0.5, 0.9]}}]}}"""
    study = study_of([0.5], space)
    record = replace(study.record(0), hyperparams={"method.name": "disk", "method.kappa": 0.5})
    (said,) = edge_warnings(study.sweep, record)
    assert "upper end of [0.3, 0.5]" in said


def test_the_words_on_a_result_hold_the_warning_once(study_of):
    study = study_of([0.5], SPACE)
    record, origin = study.record(0), origin_of(study)
    drawn = {**INSIDE, "optimizer.lr": 4.0}
    (warning,) = edge_warnings(study.sweep, replace(record, hyperparams=drawn))
    words = replace(origin, edges={0: warning}).describe_selection_bias(record)
    assert words.count(warning) == words.count("optimizer.lr") == 1
    assert origin.edges == {0: " ".join(edge_warnings(study.sweep, record))}
