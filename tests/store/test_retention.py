"""The weights of the best trials are on disk at any time, and no others once their trial ended."""

import pytest
import torch

from dpsweep.config.sweep import load_sweep
from dpsweep.store.retention import BestWeights
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study
from dpsweep.training.trial_dir import TrialDir


@pytest.fixture
def made(tmp_path, sweep_file):
    """A study and its folder, of a sweep with some settings."""

    def make(*settings):
        sweep = load_sweep(
            sweep_file, ["budget.trials=20", "keep_weights=2", "choose=observed", *settings]
        )
        state = StateFolder(tmp_path / "state")
        folder = state.sweep("tiny")
        folder.create(sweep.file, sweep.base, None)
        return Study.create(state.storage_uri, sweep, folder.id), folder

    return make


def keeper(study, folder):
    return BestWeights(study, folder, study.sweep.num_kept)


def run(study, folder, value, end="complete", *, record=None):
    """A trial that trained, as the driver tells of it; what its watchers hear is left to a test."""
    record = record or study.ask()
    trial_dir = TrialDir(folder.trial_dir(record.number))
    trial_dir.make_secret()
    row = {"epoch": 1, "step": 11, "valid/accuracy": value, "valid/loss": value}
    study.report(record.number, {**row, "noise_multiplier": 1.2, "seconds": 0.5})
    trial_dir.save_weights({"w": torch.ones(2)})
    told = study.tell(record.number, end)
    trial_dir.forget()
    return told


def kept(folder):
    return {int(p.parent.name) for p in folder.path.glob("trials/*/weights.pt")}


@pytest.mark.parametrize(
    ("metric", "after"),
    [
        ("valid/accuracy", [{0}, {0, 1}, {0, 1}, {1, 3}, {1, 3}]),
        ("valid/loss", [{0}, {0, 1}, {0, 2}, {0, 2}, {2, 4}]),
    ],
)
def test_the_weights_of_the_best_stay_and_the_beaten_ones_go_at_once(made, metric, after):
    study, folder = made(f"objective.metric={metric}")
    watcher, seen = keeper(study, folder), []
    for value in (0.5, 0.6, 0.1, 0.7, 0.2):
        watcher.on_trial_end(run(study, folder, value))
        seen.append(kept(folder))
    assert seen == after


def test_pruned_and_failed_trials_leave_no_weights_however_good(made):
    study, folder = made()
    watcher = keeper(study, folder)
    for value, end in [(0.9, "pruned"), (0.9, "failed"), (float("nan"), "complete"), (0.1, None)]:
        watcher.on_trial_end(run(study, folder, value, end or "complete"))
    assert kept(folder) == {3}


def test_each_epsilon_keeps_its_own(made):
    study, folder = made("privacy.epsilon={each: [8, 1]}")
    watcher = keeper(study, folder)
    for value in (0.9, 0.1, 0.8, 0.2, 0.7, 0.3):
        watcher.on_trial_end(run(study, folder, value))
    assert kept(folder) == {0, 2, 3, 5}


@pytest.mark.parametrize("confirm", ["{top: 1, seeds: 2, each_method: true}", None])
def test_each_method_keeps_its_own_where_the_best_of_each_are_confirmed(made, confirm):
    methods = "search={method: {one_of: [{name: disk}, {name: fftkf}]}}"
    study, folder = made("keep_weights=1", methods, f"confirm={confirm or 'null'}")
    watcher, best = keeper(study, folder), {}
    for value in range(1, 13):
        told = run(study, folder, value / 13)
        best[told.config.method.name] = told.number
        watcher.on_trial_end(told)
    assert set(best) == {"disk", "fftkf"}
    expected = set(best.values()) if confirm else {11}
    assert kept(folder) == expected == kept_after_restart(study, folder)


def test_repeats_leave_none_and_all_that_are_confirmed_are_kept(made):
    study, folder = made("keep_weights=1", "confirm={top: 3, seeds: 2}")
    assert study.sweep.num_kept == 3
    watcher = keeper(study, folder)
    for value in (0.5, 0.9, 0.8, 0.1):
        watcher.on_trial_end(run(study, folder, value))
    assert kept(folder) == {0, 1, 2}
    for _ in range(6):
        watcher.on_trial_end(run(study, folder, 0.99, record=study.ask_to_confirm()))
    assert kept(folder) == {0, 1, 2}
    assert kept(folder) == {0, 1, 2} == kept_after_restart(study, folder)
    assert study.best()[0].number in kept(folder)


def kept_after_restart(study, folder):
    keeper(Study.open(folder.storage_uri, study.sweep, folder.id), folder)
    return kept(folder)


def test_a_driver_that_died_before_it_told_the_watcher_leaves_the_same_weights(made):
    study, folder = made()
    for value in (0.5, 0.6, 0.1, 0.7):  # nobody heard
        run(study, folder, value)
    run(study, folder, 0.99, record=None, end="failed")
    assert kept(folder) == {0, 1, 2, 3, 4}
    assert kept_after_restart(study, folder) == {1, 3}
    watcher = keeper(study, folder)
    watcher.on_trial_end(study.record(3))  # told once more
    watcher.on_trial_end(study.record(1))
    assert kept(folder) == {1, 3}
    watcher.on_trial_end(run(study, folder, 0.65))
    assert kept(folder) == {3, 5}


def test_a_trial_that_was_through_and_is_not_told_yet_keeps_its_weights_over_a_restart(made):
    study, folder = made("keep_weights=1")
    watcher = keeper(study, folder)
    watcher.on_trial_end(run(study, folder, 0.5))
    record = study.ask()
    trial_dir = TrialDir(folder.trial_dir(record.number))
    trial_dir.make_secret()
    trial_dir.save_weights({"w": torch.ones(2)})  # and the driver dies
    assert kept_after_restart(study, folder) == {0, 1}
    again = keeper(study, folder)
    again.on_trial_end(run(study, folder, 0.8, record=study.record(1)))
    assert kept(folder) == {1}


def test_of_two_that_are_equally_good_the_earlier_stays(made):
    study, folder = made("keep_weights=1")
    watcher = keeper(study, folder)
    for _ in range(3):
        watcher.on_trial_end(run(study, folder, 0.5))
    assert kept(folder) == {0}
    assert study.best()[0].number == 0


def test_the_default_keeps_its_weights_until_the_choice(made):
    """It may be chosen although better results have pushed it out of the better half."""
    settings = ("choose=posterior", "search={method: default}", "budget.trials=4")
    study, folder = made(*settings)
    watcher = keeper(study, folder)
    for value in (0.900, 0.901, 0.902, 0.903):
        watcher.on_trial_end(run(study, folder, value))
    assert kept(folder) == {0, 2, 3}
    study.store_choice()
    assert study.best()[0].number == 0
    watcher.finish()
    assert kept(folder) == {0, 3}


def test_until_the_posterior_has_chosen_the_better_half_stays(made):
    study, folder = made("choose=posterior", "confirm={seeds: 2}")
    watcher = keeper(study, folder)
    for value in range(20):
        watcher.on_trial_end(run(study, folder, 0.5 + value % 7 / 100))
    observed = sorted(study.best(), key=lambda r: (-r.value, r.number))
    assert kept(folder) == {r.number for r in observed[:10]} == kept_after_restart(study, folder)
    repeat = study.ask_to_confirm()  # the search has ended, and the posterior has chosen
    assert repeat.confirms == study.best()[0].number
    best = {r.number for r in study.best()[:2]}
    watcher.finish()
    assert kept(folder) == best & {r.number for r in observed[:10]}
    assert kept_after_restart(study, folder) == kept(folder)
