"""The study remembers every trial, and saying a thing twice leaves it as it was."""

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import StateError
from dpsweep.store.study import Study


@pytest.fixture
def uri(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def sweep(sweep_file):
    return load_sweep(sweep_file, ["budget.trials=8"])


def row(epoch, accuracy):
    return {
        "epoch": epoch,
        "step": 11 * epoch,
        "valid/accuracy": accuracy,
        "valid/loss": 1.0,
        "noise_multiplier": 1.2,
        "seconds": 0.5,
    }


def test_an_asked_trial_is_stored_with_its_whole_config(uri, sweep):
    asked = Study.create(uri, sweep).ask()
    (known,) = Study.open(uri, sweep).records()
    assert known == asked
    assert known.state == "running"
    assert known.config.method.kappa == known.hyperparams["method.kappa"]


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
def test_a_search_that_is_reopened_for_each_trial_proposes_what_a_straight_one_does(
    tmp_path, sweep_file, sampler
):
    sweep = load_sweep(sweep_file, [f"sampler={{name: {sampler}, startup_trials: 2}}"])

    def search(uri, reopen):
        study = Study.create(uri, sweep)
        for number in range(6):
            study = Study.open(uri, sweep) if reopen else study
            asked = study.ask()
            study.report(asked.number, row(1, asked.hyperparams["method.kappa"]))
            study.tell(number, "complete")
        return [record.hyperparams for record in study.records()]

    straight = search(f"sqlite:///{tmp_path}/a.db", reopen=False)
    assert straight == search(f"sqlite:///{tmp_path}/b.db", reopen=True)
    assert len({tuple(hyperparams.values()) for hyperparams in straight}) == 6


def test_reports_and_ends_count_once(uri, sweep):
    study = Study.create(uri, sweep)
    number = study.ask().number
    assert study.report(number, row(1, 0.5))
    assert study.report(number, row(1, 0.9)), "a driver died before it acted on it"
    assert study.record(number).value == 0.5
    assert study.report(number, row(2, 0.6))
    assert not study.report(number, row(1, 0.5))
    first = study.tell(number, "complete")
    assert study.tell(number, "failed", reason="late") == first
    assert not study.report(number, row(3, 0.7))
    assert (first.state, first.value, first.row["epoch"]) == ("complete", 0.6, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_trial_without_a_finite_objective_has_failed(uri, sweep, value):
    study = Study.create(uri, sweep)
    number = study.ask().number
    if value is not None:
        study.report(number, row(1, value))
    record = study.tell(number, "complete")
    assert record.state == "failed"
    assert record.reason == "valid/accuracy is not a finite number"
    assert study.running() == []


@pytest.mark.parametrize(
    ("metric", "best"), [("valid/accuracy", 0.9), ("valid/loss", 1.0)], ids=["max", "min"]
)
def test_the_best_come_first(uri, sweep_file, metric, best):
    study = Study.create(uri, load_sweep(sweep_file, [f"objective.metric={metric}"]))
    for accuracy, loss in [(0.5, 2.0), (0.9, 3.0), (0.7, 1.0)]:
        number = study.ask().number
        study.report(number, {**row(1, accuracy), "valid/loss": loss})
        study.tell(number, "complete")
    assert study.best()[0].value == best


@pytest.mark.parametrize("stop", ["median", "successive_halving"])
def test_a_bad_trial_is_pruned_also_by_a_study_that_was_reopened(uri, sweep_file, stop):
    sweep = load_sweep(sweep_file, [f"pruner={{name: {stop}, reduction: 2}}"])
    study = Study.create(uri, sweep)
    for _ in range(6):
        number = study.ask().number
        study.report(number, row(1, 0.9))
        assert not study.should_prune(number)
        study.tell(number, "complete")
    study = Study.open(uri, sweep)
    number = study.ask().number
    study.report(number, row(1, 0.1))
    assert study.should_prune(number)
    assert study.tell(number, "pruned").state == "pruned"


def test_a_second_study_of_one_name_is_refused(uri, sweep):
    Study.create(uri, sweep)
    with pytest.raises(StateError, match="already has a study called 'tiny'"):
        Study.create(uri, sweep)
