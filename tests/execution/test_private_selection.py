"""A private selection tells its winner, and nothing of the search it won, whatever dies when."""

import ast
import itertools
import json
import os
import shutil
import sqlite3
import stat
import time
import warnings
from collections import Counter
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import dpsweep
from dpsweep.app.orchestrator import finish
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import StateError
from dpsweep.execution.driver import Driver
from dpsweep.execution.failures import note_begin
from dpsweep.execution.launch import reopen_session
from dpsweep.execution.private_selection import SecretSearch, forget
from dpsweep.execution.tracking import CHECKS
from dpsweep.results.export import origin_of
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study
from dpsweep.training.loop import train
from dpsweep.training.schedule import resolve_trial_schedule
from dpsweep.training.trial_dir import TrialDir

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient

SELECTED = ["accounting=private_selection", "budget.trials=4", "train.epochs=1"]


class Died(BaseException):
    """What a test does to a driver."""


@pytest.fixture
def load(sweep_file):
    return lambda *settings: load_sweep(sweep_file, [*SELECTED, *settings])


@pytest.fixture
def sweep(load):
    return load()


@pytest.fixture
def state(tmp_path):
    return StateFolder(tmp_path / "state")


@pytest.fixture
def folder(state, sweep):
    made = state.sweep("tiny")
    made.create(sweep.file, sweep.base, None)
    return made


@pytest.fixture
def study(state, folder, sweep):
    return Study.create(state.storage_uri, sweep, folder.id)


def row(accuracy):
    return {
        "epoch": 1,
        "step": 11,
        "valid/accuracy": accuracy,
        "valid/loss": 1.0,
        "noise_multiplier": 1.2,
        "privacy/epsilon_spent": 3.9,
        "seconds": 0.5,
    }


def of_length(folder, sweep, length):
    """A new search of so many trials: tests of what is in them need not wait for their number."""
    SecretSearch(folder, sweep)
    place = folder.path / "selection.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "length": length}))
    return SecretSearch(folder, sweep)


def trained(folder, number, accuracy):
    """A trial_dir as a worker leaves it that trained to the end, made up but for its files."""
    trial_dir = TrialDir(folder.trial_dir(number))
    trial_dir.make_secret()
    trial_dir.save({"x": number})
    trial_dir.save_rows([row(accuracy)])
    trial_dir.save_weights({"w": torch.tensor([float(number)])})
    return trial_dir


def run(search, folder, figures):
    """Every trial in order; None is one that fails. As the driver does, but for Ray."""
    while search.num_to_ask():
        record = search.ask()
        search.dispatch(record, void=False)
        accuracy = figures[record.number]
        trial_dir = trained(folder, record.number, 0.0 if accuracy is None else accuracy)
        search.tell(record.number, "failed" if accuracy is None else "complete")
        trial_dir.forget()


def trial_dirs(folder):
    return sorted(int(place.name) for place in (folder.path / "trials").iterdir())


def winner_of(folder):
    """By its weights, which are its first number."""
    return torch.load(TrialDir(folder.trial_dir(0)).weights, weights_only=True)["w"].item()


def test_of_each_two_trials_the_lesser_is_gone_at_once(folder, sweep):
    search, left = of_length(folder, sweep, 4), []
    for accuracy in (0.5, 0.8, None, 0.6):
        record = search.ask()
        trained(folder, record.number, accuracy or 0.99)
        search.tell(record.number, "failed" if accuracy is None else "complete")
        left.append(trial_dirs(folder))
    assert left == [[0], [1], [1], [1]]


def test_running_trials_keep_their_rooms(folder, sweep):
    search = of_length(folder, sweep, 3)
    for _ in range(3):
        trained(folder, search.ask().number, 0.1)
    search.tell(1, "complete")
    assert trial_dirs(SecretSearch(folder, sweep)._folder) == [0, 1, 2]
    search.tell(0, "failed")
    assert trial_dirs(folder) == [1, 2]


@pytest.mark.parametrize(
    ("metric", "figures", "best"),
    [("valid/accuracy", [0.5, 0.9, 0.7], 1), ("valid/loss", [0.5, 0.9, 0.2], 2)],
)
def test_the_winner_is_trial_0_with_its_own_row_config_and_weights(
    load, state, metric, figures, best
):
    sweep, folder = load(f"objective.metric={metric}"), state.sweep("tiny")
    folder.create(sweep.file, sweep.base, None)
    study = Study.create(state.storage_uri, sweep, folder.id)
    search, configs = of_length(folder, sweep, 3), []
    for value in figures:
        record = search.ask()
        configs.append(record.config)
        trial_dir = trained(folder, record.number, 0.5)
        trial_dir.save_rows(
            [{**row(0.3), "valid/loss": 9.0}, {**row(0.3), "epoch": 2, metric: value}]
        )
        search.dispatch(record, void=False)
        search.tell(record.number, "complete")
    search.publish(study, lambda: None)
    (record,) = study.records()
    assert (record.number, record.state, record.value) == (0, "complete", figures[best])
    assert record.row[metric] == figures[best]
    assert record.config == configs[best]
    assert record.hyperparams["method.kappa"] == record.config.method.kappa
    assert record.charged["steps"] == 11
    rows = TrialDir(folder.trial_dir(0)).rows()
    assert [row["seconds"] for row in rows] == [0, 0], "secret batches take their time"
    assert (record.row["seconds"], rows[-1][metric]) == (0, figures[best])
    assert (trial_dirs(folder), winner_of(folder)) == ([0], best)
    assert study.is_finished()
    assert len(origin_of(study).search_words) > 0
    assert not (folder.path / "selection.json").exists(), "how long it was is forgotten"


def test_the_winner_has_no_secret_and_no_resume_state_when_it_is_told(folder, study, sweep):
    search = of_length(folder, sweep, 2)
    for accuracy in (0.5, 0.8):
        record = search.ask()
        search.dispatch(record, void=False)
        trained(folder, record.number, accuracy)
        search.tell(record.number, "complete")  # and the driver dies before it forgets
    SecretSearch(folder, sweep).publish(study, lambda: None)
    assert {p.name for p in folder.trial_dir(0).iterdir()} == {"metrics.json", "weights.pt"}


@pytest.mark.filterwarnings("ignore")
def test_a_driver_that_goes_on_keeps_the_weights_of_the_winner_so_far(folder, state, sweep, study):
    """The study ranks no trial of it yet, and what keeps weights by that rank is not to look."""
    search = of_length(folder, sweep, 1)
    record = search.ask()
    search.dispatch(record, void=False)
    trained(folder, record.number, 0.8)
    search.tell(record.number, "complete")  # and the driver dies before it publishes
    with reopen_session("tiny", state) as session:
        session.prepare = list  # no trial is left that would need a cluster
        assert session.run([])
        assert session.study.best()[0].value == 0.8
    assert winner_of(folder) == 0


@pytest.mark.filterwarnings("ignore")
def test_the_tracking_server_hears_nothing_of_a_selection_before_its_end(
    folder, state, sweep, study, monkeypatch
):
    """When its run began and ended told how many trials there were, about a second each."""
    search = of_length(folder, sweep, 1)
    record = search.ask()
    search.dispatch(record, void=False)
    trained(folder, record.number, 0.8)
    search.tell(record.number, "complete")
    publish, heard = SecretSearch.publish, []

    def note(self, *told):
        session.tracker.flush(10)
        heard.append((folder.path / CHECKS).exists())
        heard.append(Path(state.tracking_uri.removeprefix("sqlite:///")).stat().st_size)
        publish(self, *told)

    monkeypatch.setattr(SecretSearch, "publish", note)
    with reopen_session("tiny", state) as session:
        session.prepare = list  # no trial is left that would need a cluster
        assert session.run([])
    assert heard == [True, 0], "the step was checked, and no run was made"
    client = MlflowClient(state.tracking_uri)
    (experiment,) = (e for e in client.search_experiments() if e.name == "tiny")
    parent = min(client.search_runs([experiment.experiment_id]), key=lambda r: r.info.start_time)
    assert CHECKS in {file.path for file in client.list_artifacts(parent.info.run_id)}


def test_a_search_whose_trials_all_failed_is_one_failed_trial_and_finished(folder, study, sweep):
    search = of_length(folder, sweep, 3)
    run(search, folder, [None] * 3)
    assert trial_dirs(folder) == []
    assert not study.is_finished()
    search.publish(study, lambda: None)
    assert study.num_asked() == 1
    assert study.records() == [], "nothing is known of it but that it failed"
    assert study.running() == []
    assert study.is_finished()
    assert not (folder.path / "selection.json").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_trial_without_a_finite_objective_never_wins(folder, study, sweep, value):
    search = of_length(folder, sweep, 2)
    run(search, folder, [value, 0.1])
    search.publish(study, lambda: None)
    assert study.record(0).value == 0.1


def test_nothing_is_told_before_the_end_outside_the_folder_of_its_owner(
    tmp_path, folder, study, sweep, monkeypatch
):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)  # modes left to the system would be open to all
    try:
        search = of_length(folder, sweep, 3)
        seen = outside(tmp_path, folder)
        for accuracy in (0.5, 0.9, 0.4):
            record = search.ask()
            search.dispatch(record, void=False)
            assert not search.report(record.number, row(accuracy))
            assert not search.should_prune(record.number)
            told = search.record(record.number)
            assert (told.row, told.value, told.charged) == (None, None, None)
            trained(folder, record.number, accuracy)
            told = search.tell(record.number, "complete")
            assert (told.row, told.value) == (None, None)
            SecretSearch(folder, sweep)
            assert outside(tmp_path, folder) == seen
            assert study.num_asked() == 0
            assert origin_of(study).num_trials == 0
            modes = {stat.S_IMODE(p.stat().st_mode) for p in folder.path.rglob("*.json")}
            assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder.path / "selection.json").stat().st_mode) == 0o600
            assert stat.S_IMODE((folder.path / "trials").stat().st_mode) == 0o700
            assert modes == {0o600}
    finally:
        os.umask(before)


def outside(root, folder):
    """Every file that is not in the folder; of the study, whose bytes move, a dump."""
    found = {}
    for place in root.rglob("*"):
        if place.is_file() and folder.path not in place.parents:
            is_study = place.name.startswith("study.db")
            found[place.name] = None if is_study else place.read_bytes()
    with closing(sqlite3.connect(root / "state/study.db")) as db:
        found["dump"] = list(db.iterdump())
    return found


FIGURES = [0.5, 0.9, None, 0.7]


def calls(search, folder):
    """Everything that a driver does to a search of FIGURES, one call at a time."""
    records = {}

    def begin(number):
        records[number] = search().ask() if number not in running() else search().record(number)

    def running():
        return search().running()

    for number, accuracy in enumerate(FIGURES):
        yield partial(begin, number)
        yield lambda n=number: search().dispatch(search().record(n), void=False)
        yield lambda n=number, a=accuracy: trained(folder, n, 0.99 if a is None else a)
        yield lambda n=number, a=accuracy: search().tell(n, "failed" if a is None else "complete")
    yield lambda: None


def test_a_driver_that_is_replaced_after_every_call_finds_the_same_winner(folder, study, sweep):
    of_length(folder, sweep, len(FIGURES))

    def reopened():
        return SecretSearch(folder, sweep)

    configs = [reopened().record(n).config for n in range(len(FIGURES))]
    for call in calls(reopened, folder):
        call()
        assert [reopened().record(n).config for n in range(len(FIGURES))] == configs
    assert reopened().num_to_ask() == 0
    assert reopened().running() == []
    reopened().publish(study, lambda: None)
    (record,) = study.records()
    assert (record.value, record.config) == (0.9, configs[1])
    assert winner_of(folder) == 1


def test_a_call_that_is_made_again_after_a_crash_changes_nothing(folder, study, sweep):
    search = of_length(folder, sweep, 2)
    run(search, folder, [0.5, 0.9])
    again = SecretSearch(folder, sweep)
    TrialDir(folder.trial_dir(1)).save_rows(
        [row(0.1)]
    )  # as if it were reported once more, and worse
    again.tell(1, "complete")
    again.tell(0, "complete")
    assert json.loads((folder.path / "selection.json").read_text())["cost"] == -0.9


@pytest.mark.parametrize("where", ["before the save", "after the save", "while it deletes"])
def test_a_driver_that_dies_within_a_tell_leaves_the_same_winner(
    folder, study, sweep, where, monkeypatch
):
    search = of_length(folder, sweep, 2)
    run_one = trained(folder, search.ask().number, 0.5)
    search.tell(0, "complete")
    assert run_one.path.exists()
    trained(folder, search.ask().number, 0.9)
    real = SecretSearch._save

    def die(*_):
        raise Died

    def saved(self):
        real(self)
        raise Died

    with monkeypatch.context() as patch:
        if where == "while it deletes":
            patch.setattr(shutil, "rmtree", die)
        else:
            patch.setattr(SecretSearch, "_save", die if where == "before the save" else saved)
        with pytest.raises(Died):
            search.tell(1, "complete")
    again = SecretSearch(folder, sweep)
    assert again.running() == ([1] if where == "before the save" else [])
    for number in again.running():
        again.tell(number, "complete")
    assert trial_dirs(folder) == [1]
    again.publish(study, lambda: None)
    assert study.record(0).value == 0.9


STEPS = [
    (place, name, done)
    for place, name in [(shutil, "rmtree"), (Path, "rename"), (Study, "add_winner")]
    for done in (False, True)
]
"""What publish() does, and whether the driver dies after it or instead of it."""


@pytest.mark.parametrize(("place", "name", "done"), STEPS)
@pytest.mark.parametrize("figures", [(0.5, 0.9, 0.7), (0.9, 0.5, 0.7)], ids=["moved", "in place"])
def test_a_driver_that_dies_while_it_publishes_tells_the_same_winner_once(
    folder, study, sweep, monkeypatch, figures, place, name, done
):
    search = of_length(folder, sweep, 3)
    run(search, folder, figures)
    if figures[0] != 0.9:
        TrialDir(folder.trial_dir(0))  # an empty one, as a status that looks may leave
    with monkeypatch.context() as patch:
        real = getattr(place, name)

        def dies(*args, **kwargs):
            if done:
                real(*args, **kwargs)
            raise Died

        patch.setattr(place, name, dies)
        is_moved = figures[0] != 0.9
        with pytest.raises(Died) if is_moved or name == "add_winner" else nullcontext():
            search.publish(study, lambda: None)
    again = Study.open(folder.storage_uri, sweep, folder.id)
    if not again.is_finished():
        reopened = SecretSearch(folder, sweep)
        assert (reopened.num_to_ask(), reopened.running()) == (0, [])
        reopened.publish(again, lambda: None)
    (record,) = again.records()
    assert (record.number, record.value) == (0, 0.9)
    assert (trial_dirs(folder), winner_of(folder)) == ([0], figures.index(0.9))
    forget(folder)  # as does a driver that finds the study finished
    assert not (folder.path / "selection.json").exists()


def test_configs_follow_from_a_secret_and_not_from_the_public_seed(state, sweep, tmp_path):
    drawn, lengths = [], []
    for name in ("a", "b"):
        folder = state.sweep(name)
        folder.create(sweep.file, sweep.base, None)
        search = SecretSearch(folder, sweep)
        drawn.append([search.record(n).hyperparams["method.kappa"] for n in range(4)])
        lengths.append(search.num_to_ask())
    public = [config.method.kappa for config in sweep.samples(4)]
    assert len({*drawn[0], *drawn[1], *public}) == 12
    plain = Study.create(f"sqlite:///{tmp_path}/plain.db", sweep)
    assert not {plain.ask().hyperparams["method.kappa"] for _ in range(4)} & {*drawn[0], *drawn[1]}
    keys = {json.loads(p.read_text())["key"] for p in state.root.rglob("selection.json")}
    assert len(keys) == 2
    assert all(len(bytes.fromhex(key)) == 32 for key in keys)


def test_configs_are_uniform_over_the_space_and_meet_its_conditions(load, state):
    sweep = load("where=method.kappa <= 0.8")
    folder = state.sweep("tiny")
    folder.create(sweep.file, sweep.base, None)
    search = SecretSearch(folder, sweep)
    drawn = np.array([search.record(n).config.method.kappa for n in range(300)])
    assert drawn.max() <= 0.8
    # One in a million honest searches would be called unfair.
    assert stats.kstest(drawn, stats.uniform(0.3, 0.5).cdf).pvalue > 1e-6


def test_the_number_of_trials_follows_the_law_that_is_charged(folder, sweep):
    """Geometric on 1, 2, ... with mean budget.trials; each search draws its own."""
    count, mean, found = 400, 4, []
    for _ in range(count):
        found.append(SecretSearch(folder, sweep).num_to_ask())
        (folder.path / "selection.json").unlink()
    assert min(found) >= 1
    bins = [1, 2, 3, 4, 6, 9]
    cdf = stats.geom(1 / mean).cdf
    edges = [0.0, *(cdf(k) for k in bins), 1.0]
    expected = count * np.diff(edges)
    inside = [sum(lo < k <= hi for k in found) for lo, hi in itertools.pairwise([0, *bins, 10**9])]
    # The draws are the system's: a false alarm comes once in a million runs of this test.
    assert stats.chisquare(inside, expected).pvalue > 1e-6


def test_the_number_of_trials_is_drawn_once(folder, sweep):
    first = SecretSearch(folder, sweep)
    assert {SecretSearch(folder, sweep).num_to_ask() for _ in range(20)} == {first.num_to_ask()}


def test_a_driver_runs_it_as_it_runs_a_study(folder, study, sweep, monkeypatch):
    """Real training, through the driver; the lesser trial's directory goes with it."""
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "selection")
    of_length(folder, sweep, 2)
    accuracies, configs = [], []
    with folder.lease() as lease:
        search = SecretSearch(folder, sweep)
        driver = Driver(search, folder, lease, [])
        assert driver.num_left() == 2
        for trial_id in "ab":
            assignment = driver.assign_trial(trial_id)
            trial_dir, config = TrialDir(folder.trial_dir(assignment["number"])), None
            config = search.record(assignment["number"]).config
            assert assignment["schedule"] == resolve_trial_schedule(config).to_json()
            rows = train(
                config, trial_dir, lambda row, t=trial_id: driver.take_report(t, {"row": row})
            ).rows
            accuracies.append(rows[-1]["valid/accuracy"])
            configs.append(config)
            driver.end_trial(trial_id, {"row": rows[-1], "end": "complete"})
        assert driver.assign_trial("c") is None
        assert not driver.is_waiting
        assert driver.num_left() == 0
        search.publish(study, lambda: None)
    (record,) = study.records()
    assert record.value == max(accuracies)
    assert record.config == configs[accuracies.index(max(accuracies))]
    assert record.void, "a fixed secret"
    assert trial_dirs(folder) == [0]
    left = {p.name for p in folder.trial_dir(0).iterdir()}
    assert left == {"metrics.json", "weights.pt", "confusion.json"}


def test_a_paused_trial_is_adopted_with_the_same_config_and_secret(folder, sweep):
    of_length(folder, sweep, 2)
    with folder.lease() as lease:
        search = SecretSearch(folder, sweep)
        driver = Driver(search, folder, lease, [])
        first = driver.assign_trial("a")
        secret = TrialDir(folder.trial_dir(0)).secret()
        driver.end_trial("a", {"end": "paused"})
        assert driver.stopping
        assert driver.assign_trial("b") is None
    with folder.lease() as lease:
        again = Driver(SecretSearch(folder, sweep), folder, lease, [])
        assert again.num_left() == 2
        assert again.assign_trial("c") == first
        assert TrialDir(folder.trial_dir(0)).secret() == secret
        with pytest.raises(StateError, match="being driven"), folder.lease():
            pass


def test_one_test_secret_voids_the_whole_selection_whoever_wins(folder, study, sweep):
    search = of_length(folder, sweep, 2)
    for accuracy, void in ((0.5, True), (0.9, False)):
        record = search.ask()
        search.dispatch(record, void=void)
        trained(folder, record.number, accuracy)
        search.tell(record.number, "complete")
    search.publish(study, lambda: None)
    assert study.is_void
    assert "VOID" in origin_of(study).search_words


def test_of_two_equally_good_trials_the_first_wins_whichever_ended_first(folder, study, sweep):
    search = of_length(folder, sweep, 2)
    for _ in range(2):
        search.dispatch(search.ask(), void=False)
    for number in (1, 0):
        trained(folder, number, 0.5)
    search.tell(1, "complete")
    search.tell(0, "complete")
    search.publish(study, lambda: None)
    assert winner_of(folder) == 0


def test_the_winners_seconds_are_told_nowhere(folder, study, sweep):
    search = of_length(folder, sweep, 1)
    run(search, folder, [0.5])
    search.publish(study, lambda: None)
    assert study.records()[0].seconds == 0


def test_what_a_killed_writer_left_of_the_ledger_goes_with_it(folder, study, sweep):
    search = of_length(folder, sweep, 1)
    run(search, folder, [0.5])
    (folder.path / ".selection.json.abcdefgh").write_text("{}")
    search.publish(study, lambda: None)
    assert not list(folder.path.glob("*selection*"))
    assert not list(folder.path.glob(".selection*"))


def test_trials_that_are_refused_are_not_counted_aloud(folder, sweep, monkeypatch, caplog):
    search = of_length(folder, sweep, 3)
    monkeypatch.setattr(search, "_try_draw", lambda draw: None)
    with folder.lease() as lease:
        driver = Driver(search, folder, lease, [])
        assert driver.assign_trial("a") is None
    assert search.num_to_ask() == 0
    assert caplog.records == []
    assert search.running() == []


def test_what_a_private_selection_is_stands_in_few_places():
    """It is a Search and a Disclosure of its own: nobody else asks whether a sweep is one."""
    package = Path(dpsweep.__file__).parent
    asked = Counter(
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "is_private_selection"
    )
    assert asked == {
        "app/orchestrator.py": 1,  # not on a cluster
        "config/sweep.py": 4,
        "execution/changes.py": 3,  # never raised, and begins from nothing
        "execution/launch.py": 1,  # which Search
        "results/disclosure.py": 1,  # which Disclosure
        "search/charge.py": 3,
        "store/study.py": 1,  # when it is finished
    }


def test_a_selection_that_ended_is_not_run_again_where_an_older_study_is_put_back(
    folder, study, sweep, state
):
    """It deleted the winner that was published, and released a second one."""
    search = of_length(folder, sweep, 2)
    run(search, folder, [0.5, 0.8])
    search.publish(study, lambda: None)
    with pytest.raises(
        StateError, match="of a private selection that has ended, and the study does"
    ):
        SecretSearch(folder, sweep)
    assert winner_of(folder) == 1


def test_times_of_files_do_not_tell_when_the_winner_ended(folder, study, sweep):
    search = of_length(folder, sweep, 2)
    run(search, folder, [0.5, 0.8])
    (folder.path / CHECKS).write_text("checked")
    note_begin(folder.trial_dir(1), "node")
    long_ago = time.time() - 9_000
    old = [*(folder.path / "trials").rglob("*"), folder.path / CHECKS, folder.path / "sweep.yaml"]
    for place in old:
        os.utime(place, (long_ago, long_ago))
    search.publish(study, lambda: None)
    seen = [*(folder.path / "trials").rglob("*"), folder.path / CHECKS, folder.path / "sweep.yaml"]
    assert "begun" not in {place.name for place in seen}
    assert len(seen) > 4
    assert max(p.stat().st_mtime for p in seen) - min(p.stat().st_mtime for p in seen) < 1
    assert min(p.stat().st_mtime for p in seen) > long_ago + 8_000


@pytest.mark.filterwarnings("ignore")
def test_a_selection_that_was_stopped_is_not_told_to_the_tracker(folder, state, sweep, study):
    of_length(folder, sweep, 2)
    with reopen_session("tiny", state) as session:
        finish(session, None, complete=False)
        session.tracker.flush(10)
        assert Path(state.tracking_uri.removeprefix("sqlite:///")).stat().st_size == 0
    assert "No trial" not in (folder.path / "privacy.md").read_text()
