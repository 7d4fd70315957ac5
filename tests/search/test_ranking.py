"""With few trials the default keeps its place, unless another trial is clearly ahead of it."""

import math

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.search.ranking import LEAST_TRIALS, make_choice, rank_trials
from dpsweep.store.study import Study

DEFAULT = "search={method: default}"
SHARED = ("privacy.scope=sweep", "budget={explore: {trials: 3, share: 0.1}}")
ERROR = math.sqrt(0.9 * 0.1 / 360)
"""A standard error of 0.9 on the 360 test images of digits: 0.0158."""


@pytest.fixture
def searched(uri, sweep_file):
    """Makes a study whose trials came to these accuracies; None is one that failed."""

    def search(accuracies, *settings):
        budget = f"budget.trials={len(accuracies)}"
        study = Study.create(uri, load_sweep(sweep_file, [DEFAULT, budget, *settings]))
        for accuracy in accuracies:
            end(study, study.ask(), accuracy)
        study.store_choice()
        return study

    return search


def end(study, asked, accuracy):
    if accuracy is None:
        study.tell(asked.number, "failed")
        return
    row = {"epoch": 1, "step": 11, "valid/accuracy": accuracy, "valid/loss": 1 - accuracy}
    study.report(asked.number, {**row, "noise_multiplier": 1.2, "seconds": 0.5})
    study.tell(asked.number, "complete")


@pytest.mark.parametrize(
    ("accuracies", "first"),
    [
        ([0.9, 0.9 + 0.99 * ERROR, 0.5], 0),
        ([0.9, 0.9 + 1.01 * ERROR, 0.5], 1),
        ([0.9, 0.5, 0.4], 0),
        ([None, 0.9, 0.905], 2),
        ([1.0, 1.0, 0.5], 0),
        ([0.0, 0.001, 0.002], 2),  # a share of 0 has no error, and anything is ahead of it
    ],
)
def test_the_default_is_beaten_by_more_than_a_standard_error(searched, accuracies, first):
    best = searched(accuracies).best()
    assert best[0].number == first
    values = [r.value for r in best[1:] if r.number]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    "settings",
    [
        ("choose=observed",),
        ("search={optimizer.lr: {log_uniform: [0.1, 10]}}",),
        ("search={optimizer.lr: {log_uniform: [0.1, 10]}}", "start=[{optimizer.lr: 1}]"),
        ("search={each_of: [dp_sgd, disk]}",),
        (DEFAULT, "privacy.epsilon={each: [1, 4]}"),
        (DEFAULT, "objective.metric=valid/loss"),
        # first trials that are not the default, whose step or batch size is left out
        ("search={method: default, optimizer.total_step: {log_uniform: [1, 5]}}",),
        ("search={method: default, train.batch_size: {choice: [64, 128]}}",),
    ],
)
def test_elsewhere_the_best_result_is_chosen(searched, settings):
    study = searched([0.9, 0.901, 0.5], *settings)
    assert [r.margin for r in study.records()] == [None] * 3
    assert study.best()[0].number == 1


def test_from_twelve_trials_on_the_posterior_chooses_instead(searched):
    study = searched([0.9, 0.901, *[0.5] * (LEAST_TRIALS - 2)])
    assert {r.margin for r in study.records()} == {None}
    assert all(r.expected is not None for r in study.records())


def test_a_margin_follows_from_the_examples_that_are_measured(searched):
    study = searched([0.9, 0.905], "data.validation=holdout", "data.holdout_fraction=0.1")
    num = study.sweep.written.data.num_held_out
    margin = make_choice(study.sweep, study.records()).margin
    assert margin == pytest.approx(math.sqrt(0.09 / num))
    assert num != 360


def test_the_final_run_has_the_default_that_kept_its_place(searched):
    study = searched([0.9, 0.905, 0.5], *SHARED)
    final = study.ask_to_confirm()
    assert final.final
    assert final.config.privacy.clip_norm == study.record(0).config.privacy.clip_norm
    assert final.config.privacy.clip_norm != study.record(1).config.privacy.clip_norm


def test_the_choice_holds_until_another_trial_is_complete(searched):
    study = searched([0.9, 0.905], "budget.trials=3")
    assert study.best()[0].number == 0
    end(study, study.ask(), 0.95)
    assert {r.margin for r in study.records()} == {None}
    study.store_choice()
    assert [r.number for r in rank_trials(study.records(), sign=-1)] == [2, 1, 0]
