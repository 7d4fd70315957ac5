"""Trials at several budgets do not learn from each other; two objectives end in a front."""

from collections import Counter

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.search.objectives import find_pareto_front, group_by_epsilon
from dpsweep.search.propose import propose
from dpsweep.store.study import Study

EACH = "privacy.epsilon={each: [1, 2, 8]}"


def load(sweep_file, *settings):
    return load_sweep(sweep_file, ["budget.trials=60", *settings])


def test_budgets_take_turns_and_each_trial_is_calibrated_to_its_own(sweep_file, search):
    study = search(load(sweep_file, EACH), 7, lambda r: 0.5)
    assert [r.config.privacy.epsilon for r in study.records()] == [1, 2, 8, 1, 2, 8, 1]
    assert [r.hyperparams["privacy.epsilon"] for r in study.records()] == [1, 2, 8, 1, 2, 8, 1]
    assert "privacy.epsilon" not in study._study.get_trials()[0].params


def test_methods_and_budgets_in_turn_meet_in_all_pairs(sweep_file, search):
    sweep = load(sweep_file, EACH, "search={each_of: [disk, dp_sgd, doppler]}")
    study = search(sweep, 9, lambda r: 0.5)
    pairs = Counter((r.config.privacy.epsilon, r.config.method.name) for r in study.records())
    assert len(pairs) == 9


def test_a_proposal_depends_on_the_trials_of_its_own_budget_alone(sweep_file, search):
    """The next trial is at epsilon 1: results at 2 and 8 change nothing, those at 1 do."""
    sweep = load(sweep_file, EACH, "sampler={name: tpe, startup_trials: 3}")

    def judge(own, others):
        def value(record):
            kappa = record.hyperparams["method.kappa"]
            return own * kappa if record.hyperparams["privacy.epsilon"] == 1 else others * kappa

        return value

    def proposed(name, own, others):
        return propose(sweep, search(sweep, 18, judge(own, others), name=name)._study).params

    first = proposed("a", 1, 1)
    assert proposed("b", 1, -1) == first
    assert proposed("c", -1, 1) != first


@pytest.mark.parametrize("stop", ["median", "successive_halving"])
def test_a_trial_is_pruned_for_its_rivals_at_the_same_budget_alone(sweep_file, search, stop):
    sweep = load(
        sweep_file, "privacy.epsilon={each: [1, 8]}", f"pruner={{name: {stop}, reduction: 2}}"
    )
    study = search(sweep, 12, lambda r: 0.3 if r.hyperparams["privacy.epsilon"] == 1 else 0.9)
    ends = {}
    for accuracy in (0.4, 0.4):  # good at epsilon 1, bad at 8
        record = study.ask()
        row = {"epoch": 1, "step": 11, "valid/accuracy": accuracy, "valid/loss": 1.0}
        study.report(record.number, {**row, "noise_multiplier": 1.2, "seconds": 0.5})
        ends[record.hyperparams["privacy.epsilon"]] = study.should_prune(record.number)
    assert ends == {1: False, 8: True}


def test_the_even_sequence_starts_anew_at_each_budget(sweep_file, search):
    sweep = load(sweep_file, "privacy.epsilon={each: [1, 8]}", "sampler.name=qmc")
    records = search(sweep, 8, lambda r: 0.5).records()
    low, high = ([r.hyperparams["method.kappa"] for r in records[i::2]] for i in (0, 1))
    assert low == high


def test_trials_come_by_budget_the_smallest_first(sweep_file, search):
    sweep = load(sweep_file, "privacy.epsilon={each: [8, 1]}")
    study = search(sweep, 6, lambda r: 0.1 * r.number)
    assert [[r.number for r in group] for group in group_by_epsilon(study.best())] == [
        [5, 3, 1],
        [4, 2, 0],
    ]
    plain = search(load(sweep_file), 2, lambda r: 0.1 * r.number, name="plain")
    assert [[r.number for r in group] for group in group_by_epsilon(plain.best())] == [[1, 0]]


FIGURES = [(0.5, 1.0), (0.7, 2.0), (0.6, 3.0), (0.7, 2.5), (0.9, 9.0), (0.5, 1.0)]
"""Accuracy and seconds; the third and the fourth are beaten by the second."""


def judged(study, figures):
    for accuracy, seconds in figures:
        number = study.ask().number
        row = {"epoch": 1, "step": 11, "valid/accuracy": accuracy, "valid/loss": -accuracy}
        row |= {"noise_multiplier": 1.2, "privacy/epsilon_spent": 3.9, "seconds": seconds}
        study.report(number, row)
        study.tell(number, "complete")


def test_the_front_is_what_no_other_trial_beats(sweep_file, uri):
    study = Study.create(uri, load(sweep_file, "objective={metrics: [valid/accuracy, seconds]}"))
    judged(study, FIGURES)
    assert [r.number for r in study.front()] == [4, 1, 0, 5]
    assert {t.number for t in study._study.best_trials} == {4, 1, 0, 5}  # Optuna's own
    assert [r.number for r in study.best()][:2] == [4, 1]
    assert study.record(4).value == 0.9


def test_the_front_of_one_objective_is_its_best(sweep_file, uri):
    study = Study.create(uri, load(sweep_file))
    judged(study, FIGURES)
    assert [r.number for r in find_pareto_front(study.records(), study.sweep.config.objective)] == [
        4
    ]


def test_a_pruned_trial_is_on_no_front(sweep_file, uri):
    study = Study.create(uri, load(sweep_file))
    judged(study, FIGURES[:1])
    number = study.ask().number
    row = {"epoch": 1, "step": 11, "valid/accuracy": 0.9, "valid/loss": 1.0, "seconds": 1.0}
    study.report(number, row)
    study.tell(number, "pruned")
    assert [r.number for r in study.front()] == [0]


@pytest.mark.parametrize(
    "sampler", ["tpe", "random", "qmc", pytest.param("gp", marks=pytest.mark.slow)]
)
def test_two_objectives_are_searched(sweep_file, uri, sampler):
    sweep = load(
        sweep_file,
        "objective={metrics: [valid/accuracy, seconds]}",
        f"sampler={{name: {sampler}, startup_trials: 2}}",
    )
    study = Study.create(uri, sweep)
    judged(study, FIGURES[:4])
    assert len({r.hyperparams["method.kappa"] for r in study.records()}) == 4


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_a_trial_without_its_second_objective_has_failed(sweep_file, uri, seconds):
    study = Study.create(uri, load(sweep_file, "objective={metrics: [valid/accuracy, seconds]}"))
    judged(study, [(0.5, seconds)])
    (record,) = study.records()
    assert record.state == "failed"
    assert record.reason == "valid/accuracy or seconds is not a finite number"


def test_epsilon_as_an_objective_is_what_was_promised_or_else_spent(sweep_file, tmp_path):
    goal = "objective={metrics: [valid/accuracy, epsilon]}"
    for name, how, values in [
        ("a", EACH, [1.0, 2.0]),
        ("b", "privacy={noise_multiplier: 1.0}", [3.9, 3.9]),
    ]:
        study = Study.create(f"sqlite:///{tmp_path}/{name}.db", load(sweep_file, goal, how))
        judged(study, FIGURES[:2])
        assert [t.values[1] for t in study._study.get_trials()] == values
