"""Repeats of the best configs say how good they are, cost what they cost, and are no search."""

from dataclasses import replace

import pytest

from dpsweep.config.budget import ConfirmConfig
from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.privacy.accounting import compose_runs
from dpsweep.privacy.statement import format_epsilon
from dpsweep.results.best_trials import list_best_by_budget
from dpsweep.results.export import origin_of
from dpsweep.search.charge import get_charged_run
from dpsweep.search.confirmation import (
    find_next_repeat,
    list_candidates,
    summarize_repeats,
)
from dpsweep.search.propose import propose
from dpsweep.search.ranking import rank_by_confirmed
from dpsweep.search.trial_record import Record
from dpsweep.store.study import Study

TREE = {
    "data": {"name": "digits"},
    "model": {"name": "cnn_small", "width": 2},
    "privacy": {"epsilon": 4},
    "train": {"batch_size": 479, "epochs": 2},
    "optimizer": {"lr": 1.0},
    "method": {"name": "dp_sgd"},
}
CONFIG = TrialConfig.model_validate(TREE)
TWICE = "confirm={top: 2, seeds: 2}"


def record(number, value=0.5, *, epsilon=4.0, confirms=None, state="complete"):
    privacy = CONFIG.privacy.model_copy(update={"epsilon": epsilon})
    return Record(
        number=number,
        state=state,
        config=CONFIG.model_copy(update={"privacy": privacy}),
        hyperparams={},
        row=None,
        value=value,
        reason=None,
        void=False,
        dispatched=True,
        confirms=confirms,
    )


def repeats_of(number, *values, failed=0):
    """Repeats of one trial, and some that failed."""
    done = [record(100 * number + i, v, confirms=number) for i, v in enumerate(values)]
    lost = [record(900 + i, 0.1, confirms=number, state="failed") for i in range(failed)]
    return done + lost


def test_the_first_few_of_each_epsilon_are_candidates():
    ranking = [record(n, epsilon=e) for n, e in [(4, 8), (2, 8), (0, 8), (1, 1), (3, 1), (5, 1)]]
    chosen = list_candidates(ranking, ConfirmConfig(top=2, seeds=2))
    assert [c.number for c in chosen] == [4, 2, 1, 3]
    assert list_candidates([], ConfirmConfig()) == []
    one = ConfirmConfig()
    assert [c.number for c in list_candidates(ranking, one)] == [4, 1]


def test_the_first_few_of_each_method_are_candidates_where_methods_are_compared():
    ranking = [record(n) for n in (4, 2, 0, 1)]
    other = TrialConfig.model_validate({**TREE, "method": {"name": "dp_adam"}})
    ranking = [replace(r, config=other) if r.number in (0, 1) else r for r in ranking]
    compared = ConfirmConfig(top=1, seeds=2, each_method=True)
    assert [c.number for c in list_candidates(ranking, compared)] == [4, 0]
    assert [c.number for c in list_candidates(ranking, ConfirmConfig(top=2, seeds=2))] == [4, 2]


def test_repeats_of_each_method_are_planned(load):
    each = ("method={each_of: [{name: dp_sgd}, {name: disk, kappa: 0.7}]}",)
    settings = [f"search.{each[0]}", "confirm={top: 2, seeds: 3, each_method: true}"]
    assert load(*settings).num_runs == 4 + 2 * 3 * 2
    shared = load(*settings, "privacy.scope=sweep")
    assert shared.search_budget.num_runs == 4 + 2 * 3 * 2


def test_repeats_of_each_of_one_method_are_refused(load):
    with pytest.raises(ConfigError, match=r"confirm\.each_method: the search has one method, "):
        load("confirm={top: 2, seeds: 3, each_method: true}")


def test_candidates_take_turns_until_each_has_its_runs():
    ranking, config = [record(n) for n in (5, 2, 7, 0)], ConfirmConfig(top=3, seeds=2)
    order, repeats = [], []
    while (chosen := find_next_repeat(ranking, repeats, config)) is not None:
        order.append(chosen.number)
        state = ("running", "failed", "complete")[len(order) % 3]  # each was charged
        repeats.append(record(10 + len(order), confirms=chosen.number, state=state))
    assert order == [5, 2, 7, 5, 2, 7]


def test_repeats_of_a_trial_that_is_no_candidate_any_more_do_not_stand_for_others():
    ranking, config = [record(n) for n in (5, 2)], ConfirmConfig(top=1, seeds=2)
    assert find_next_repeat(ranking, repeats_of(2, 0.5, 0.5), config).number == 5
    assert (
        find_next_repeat(ranking, [*repeats_of(2, 0.5), *repeats_of(5, 0.5, 0.5)], config) is None
    )


def test_nothing_is_missing_where_no_trial_was_completed():
    assert find_next_repeat([], [], ConfirmConfig()) is None


def test_a_mean_is_of_completed_repeats_without_the_chosen_trial_itself():
    running = record(50, 0.0, confirms=1, state="running")
    found = summarize_repeats([record(1, 0.99), *repeats_of(1, 0.5, 0.7, failed=1), running])
    assert found.keys() == {1}
    one = found[1]
    assert (one.mean, one.num_failed) == (pytest.approx(0.6), 1)
    assert one.spread == pytest.approx(0.02**0.5)  # ((0.1)^2 + (0.1)^2) / (2 - 1)
    assert str(one) == "0.6000 ± 0.1414 over 2 runs (1 more failed)"
    single = summarize_repeats(repeats_of(1, 0.5))[1]
    assert str(single) == "0.5000 in 1 run"


def test_a_config_whose_repeats_all_failed_is_not_confirmed():
    assert summarize_repeats(repeats_of(3, failed=2)) == {}


@pytest.mark.parametrize("sign", [-1, 1], ids=["max", "min"])
def test_confirmed_trials_come_by_their_means_and_the_others_after_them_as_they_were(sign):
    ranking = [record(n) for n in (5, 2, 7, 4)]
    found = summarize_repeats([*repeats_of(2, 0.5), *repeats_of(7, 0.4, 0.8)])
    confirmed = [7, 2] if sign == -1 else [2, 7]
    ordered = rank_by_confirmed(ranking, found, sign)
    assert [r.number for r in ordered] == [*confirmed, 5, 4]
    assert rank_by_confirmed(ranking, {}, sign) == ranking


def test_a_repeat_that_failed_weighs_more_than_any_mean():
    ranking = [record(n) for n in (1, 2)]
    found = summarize_repeats([*repeats_of(1, 0.9, 0.9, failed=1), *repeats_of(2, 0.2)])
    assert [r.number for r in rank_by_confirmed(ranking, found, -1)] == [2, 1]


def row(accuracy, epoch=1):
    return {
        "epoch": epoch,
        "step": 11 * epoch,
        "valid/accuracy": accuracy,
        "valid/loss": 1.0,
        "noise_multiplier": 1.2,
        "privacy/epsilon_spent": 1.0,
        "seconds": 0.5,
    }


def ended(study, asked, accuracy, end="complete"):
    study.report(asked.number, row(accuracy))
    return study.tell(asked.number, end)


def searched(uri, sweep, *accuracies):
    study = Study.create(uri, sweep)
    for accuracy in accuracies:
        ended(study, study.ask(), accuracy)
    return study


def confirm(study, judge):
    """Runs all repeats; one of trial N comes to `judge(N)`. Returns what was repeated."""
    order = []
    while (asked := study.ask_to_confirm()) is not None:
        order.append(asked.confirms)
        ended(study, asked, judge(asked.confirms))
    return order


@pytest.fixture
def load(sweep_file):
    def load_it(*settings):
        return load_sweep(sweep_file, ["budget.trials=4", TWICE, *settings])

    return load_it


def test_a_repeat_is_stored_with_the_config_it_repeats_before_it_is_run(uri, load):
    study = searched(uri, load(), 0.5, 0.9, 0.7, 0.6)
    asked = study.ask_to_confirm()
    known = Study.open(uri, study.sweep).record(asked.number)
    assert known == asked
    assert (known.number, known.confirms, known.state) == (4, 1, "running")
    assert known.config == study.record(1).config.model_copy(update={"seed": 1})
    assert known.hyperparams == study.record(1).hyperparams
    assert not known.dispatched, "it draws a secret of its own"


def test_the_first_repeats_of_two_configs_start_from_the_same_weights_and_so_on(uri, load):
    study = searched(uri, load(), 0.5, 0.9, 0.7, 0.6)
    confirm(study, lambda number: 0.5)
    seeds = [(r.confirms, r.config.seed) for r in study.records() if r.confirms is not None]
    assert seeds == [(1, 1), (2, 1), (1, 2), (2, 2)]
    assert {r.config.seed for r in study.best()} == {0}, "what is exported keeps its own"


def test_held_out_examples_stay_held_out_in_repeats(uri, load):
    study = searched(uri, load("data.validation=holdout"), 0.5, 0.9, 0.7, 0.6)
    confirm(study, lambda number: 0.5)
    assert {r.config.seed for r in study.records()} == {0}


def test_repeats_are_no_trials_of_the_search_and_the_best_observed_is_not_the_best(uri, load):
    study = searched(uri, load(), 0.5, 0.9, 0.8, 0.6)
    assert confirm(study, {1: 0.55, 2: 0.75}.get) == [1, 2, 1, 2]
    assert (study.num_asked(), study.num_to_ask(), study.num_to_confirm()) == (4, 0, 0)
    assert len(study.records()) == 8
    assert [r.number for r in study.best()] == [2, 1, 3, 0]
    assert [r.number for r in list_best_by_budget(study)] == [2]
    assert [r.number for r in study.front()] == [1]
    assert study.confirmed()[2].values == (0.75, 0.75)


def test_the_best_by_loss_is_confirmed_by_loss(uri, load):
    study = searched(uri, load("objective.metric=valid/loss"), 0.5)
    for loss in (0.2, 0.3, 0.9):
        asked = study.ask()
        study.report(asked.number, {**row(0.5), "valid/loss": loss})
        study.tell(asked.number, "complete")
    for number, loss in [(1, 0.8), (2, 0.4)] * 2:
        asked = study.ask_to_confirm()
        assert asked.confirms == number
        study.report(asked.number, {**row(0.5), "valid/loss": loss})
        study.tell(asked.number, "complete")
    assert [r.number for r in study.best()][:2] == [2, 1]


@pytest.mark.parametrize("sampler", ["random", "tpe", "qmc"])
def test_a_search_that_goes_on_after_repeats_proposes_as_if_there_were_none(
    tmp_path, load, sampler
):
    learns = f"sampler={{name: {sampler}, startup_trials: 2}}"
    sweep, figures = load("budget.trials=9", learns), (0.5, 0.9, 0.8, 0.6)
    plain = searched(f"sqlite:///{tmp_path}/plain.db", sweep, *figures)
    uri = f"sqlite:///{tmp_path}/confirmed.db"
    confirm(searched(uri, load(learns), *figures), lambda _: -5.0)  # would turn any that saw it
    confirmed = Study.open(uri, sweep)
    assert propose(sweep, confirmed._study).params == propose(sweep, plain._study).params
    assert confirmed.num_to_ask() == plain.num_to_ask() == 5


@pytest.mark.parametrize("stop", ["median", "successive_halving"])
def test_repeats_are_never_pruned_and_prune_nobody(uri, load, stop):
    """A mean over those that were not pruned would be one over the good."""
    sweep = load("budget.trials=9", f"pruner={{name: {stop}, reduction: 2}}")
    study = Study.create(uri, sweep)

    def prunes(asked, accuracy):
        study.report(asked.number, row(accuracy))
        return study.should_prune(asked.number)

    for _ in range(6):
        asked = study.ask()
        assert not prunes(asked, 0.3)
        study.tell(asked.number, "complete")
    for accuracy in (0.01, 0.9, 0.9, 0.9):
        asked = study.ask_to_confirm()
        assert not prunes(asked, accuracy)
        study.tell(asked.number, "complete")
    assert not prunes(study.ask(), 0.35), "better than every trial of the search"
    assert prunes(study.ask(), 0.1)


def test_each_repeat_is_charged_as_a_trial_from_its_hand_out(uri, load):
    study = searched(uri, load(), 0.5, 0.9, 0.8, 0.6)
    asked = study.ask_to_confirm()
    handed = study.dispatch(asked, void=False)
    assert handed.charged == study.record(asked.number).charged
    runs = [get_charged_run(r) for r in study.records()]
    assert len(runs) == 5
    words = origin_of(study).search_words
    assert "4 adaptive trials and 1 confirming run" in words
    delta = study.sweep.written.delta
    assert f"({format_epsilon(compose_runs(runs, delta))}, " in words
    assert format_epsilon(compose_runs(runs[:4], delta)) not in words
    study.tell(asked.number, "failed")
    confirm(study, lambda number: 0.5)
    runs = [get_charged_run(r) for r in study.records()]
    words = origin_of(study).search_words
    assert "4 adaptive trials and 4 confirming runs" in words
    assert f"({format_epsilon(compose_runs(runs, delta))}, " in words
    assert origin_of(study).num_trials == 4


def test_a_sweep_stopped_amid_its_repeats_goes_on_with_those_that_are_missing(uri, load):
    study = searched(uri, load(), 0.5, 0.9, 0.8, 0.6)
    assert not study.is_finished()
    assert study.num_to_confirm() == 4
    ended(study, study.ask_to_confirm(), 0.5)
    left = study.ask_to_confirm()

    study = Study.open(uri, study.sweep)
    assert study.running() == [left.number]
    assert not study.is_finished()
    assert (study.num_to_ask(), study.num_to_confirm()) == (0, 2)
    adopted = study.record(left.number)
    assert adopted.confirms == 2
    ended(study, adopted, 0.5)
    assert confirm(study, lambda number: 0.5) == [1, 2]
    assert study.is_finished()
    assert Study.open(uri, study.sweep).is_finished()


def test_the_last_repeat_has_to_end_before_the_sweep_is_finished(uri, load):
    study = searched(uri, load("confirm={top: 1, seeds: 2}"), 0.5, 0.9, 0.8, 0.6)
    ended(study, study.ask_to_confirm(), 0.5)
    last = study.ask_to_confirm()
    assert study.ask_to_confirm() is None
    assert study.num_to_confirm() == 0
    assert not study.is_finished()
    study.tell(last.number, "failed")
    assert study.is_finished(), "a repeat that failed is not tried again"


def test_fewer_complete_trials_than_are_to_be_confirmed_are_all_confirmed(uri, load):
    study = searched(uri, load(), 0.5)
    for _ in range(3):
        study.tell(study.ask().number, "failed")
    assert study.num_to_confirm() == 2
    assert confirm(study, lambda number: 0.4) == [0, 0]
    assert study.num_to_confirm() == 0
    assert study.is_finished()


def test_each_epsilon_has_its_own_repeats_and_its_own_best(uri, load):
    sweep = load("budget.trials=6", "privacy.epsilon={each: [8, 1]}", TWICE)
    assert sweep.num_runs == 6 + 2 * 2 * 2
    study = searched(uri, sweep, 0.90, 0.50, 0.85, 0.40, 0.10, 0.45)
    # At epsilon 8 trials 0, 2, 4; at 1 trials 1, 3, 5.
    assert study.num_to_confirm() == 8
    order = confirm(study, {0: 0.6, 2: 0.8, 1: 0.3, 5: 0.44}.get)
    assert order == [0, 2, 1, 5] * 2
    assert study.is_finished()
    assert [(r.number, r.config.privacy.epsilon) for r in list_best_by_budget(study)] == [
        (5, 1),
        (2, 8),
    ]
    assert "6 adaptive trials and 8 confirming runs" in origin_of(study).search_words


def test_a_search_that_goes_on_has_its_new_best_confirmed_too(uri, load):
    study = searched(uri, load("confirm={top: 1, seeds: 2}"), 0.5, 0.9, 0.8, 0.6)
    assert confirm(study, lambda number: 0.7) == [1, 1]
    more = Study.open(uri, load("confirm={top: 1, seeds: 2}", "budget.trials=5"))
    assert more.num_to_confirm() == 2, "the next trial may be better than all before"
    ended(more, more.ask(), 0.95)
    assert more.num_to_confirm() == 2
    assert not more.is_finished()
    assert confirm(more, lambda number: 0.8) == [6, 6]
    assert more.is_finished()
    assert [r.number for r in more.best()][:2] == [6, 1]


def test_a_budget_that_all_runs_share_pays_for_no_more_of_them_than_were_planned(uri, load):
    settings = ["confirm={top: 1, seeds: 2}", "privacy.scope=sweep"]
    study = searched(uri, load(*settings), 0.5, 0.9, 0.8)
    assert confirm(study, lambda number: 0.7) == [1, 1]  # as after budget.hours
    ended(study, study.ask(), 0.95)  # no driver asks for it: see the next test
    assert study.num_to_confirm() == 0
    assert study.ask_to_confirm() is None
    assert study.is_finished()
    assert len(study.records()) == study.sweep.num_runs
    assert study.sweep.search_budget.covers([get_charged_run(r) for r in study.records()])


def test_results_do_not_decide_how_many_runs_a_search_that_ran_out_of_time_has(uri, load):
    settings = ["confirm={top: 1, seeds: 4}"]
    study = searched(uri, load(*settings), 0.4)
    assert study.num_to_ask() == 3
    assert confirm(study, lambda number: 0.4) == [0] * 4  # as after budget.hours
    again = Study.open(uri, load(*settings))
    assert again.num_to_ask() == again.num_to_confirm() == 0
    assert again.is_finished()


def test_a_search_that_ran_out_of_time_has_ended_whoever_is_to_be_repeated(uri, load):
    settings = "confirm={top: 1, seeds: 2}"
    study = searched(uri, load(settings), 0.4)
    confirm(study, lambda number: 0.4)
    for accuracy, repeats in ((0.3, 0), (0.9, 2)):  # the best is the old one, then another
        trials = 6 + len(study.records())
        study = Study.open(uri, load(settings, f"budget.trials={trials}"))
        ended(study, study.ask(), accuracy)
        assert len(confirm(study, lambda number: 0.4)) == repeats
        assert study.num_to_ask() == 0
        assert study.num_dropped() > 0
        assert study.is_finished()


def test_more_trials_than_before_go_on_after_the_time_ran_out(uri, load):
    study = searched(uri, load("confirm={top: 1, seeds: 2}"), 0.4)
    confirm(study, lambda number: 0.4)
    more = Study.open(uri, load("confirm={top: 1, seeds: 2}", "budget.trials=6"))
    assert more.num_to_ask() == 5
    assert not more.is_finished()


def test_repeats_stand_in_no_table_of_a_search_that_has_none(uri, load):
    study = searched(uri, load("confirm=null"), 0.5, 0.9, 0.8, 0.6)
    assert study.num_to_confirm() == 0
    assert study.ask_to_confirm() is None
    assert study.is_finished()
    assert study.confirmed() == {}
    assert all(r == replace(r, confirms=None) for r in study.records())
