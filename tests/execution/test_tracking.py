"""The parent run never says less than has been spent, whatever the sweep grew to."""

import json
import re
import shutil
import warnings

import pytest

from dpsweep.config.source import read_yaml
from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import load_trial
from dpsweep.execution import tracking as place
from dpsweep.execution.driver import Driver
from dpsweep.execution.launch import reopen_session
from dpsweep.privacy.accounting import compose_runs
from dpsweep.privacy.statement import format_epsilon
from dpsweep.search.charge import get_charged_run
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.statement import describe_search_privacy
from dpsweep.store.study import Study

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient

    from dpsweep.execution.tracking import TrackingWatcher
    from dpsweep.tracking.mlflow import MlflowSink
    from dpsweep.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore")

ROW = {
    "epoch": 2,
    "step": 22,
    "valid/accuracy": 0.5,
    "valid/loss": 1.0,
    "noise_multiplier": 1.2,
    "privacy/epsilon_spent": 1.0,
    "seconds": 0.5,
}


class World:
    """A sweep on disk, tracked by a real MLflow store; each session is a driver of its own."""

    def __init__(self, tmp_path, sweep_file, store):
        shutil.copy(store, tmp_path / "mlflow.db")
        self.file, self.state = sweep_file, StateFolder(tmp_path / "state")
        self.uri, self.artifacts = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "artifacts"
        sweep = load_sweep(sweep_file, ["budget.trials=1"])
        self.folder = self.state.sweep("tiny")
        self.folder.create(sweep.file, sweep.base, None)
        Study.create(self.folder.storage_uri, sweep, self.folder.id)

    def session(self, *settings, deliver=None):
        """What `launch` and `resume` do before the first trial is dispatched."""
        self.study = Study.open(self.folder.storage_uri, load_sweep(self.file, list(settings)))
        self.study.note_plan()
        sink = deliver or MlflowSink(self.uri, "tiny", self.folder.id, self.artifacts)
        tracker = Tracker(self.folder.path, sink)
        watcher = TrackingWatcher(tracker, self.study, self.folder)
        watcher.reconcile()
        return tracker, watcher

    def driver(self, watcher, lease):
        return Driver(self.study, self.folder, lease, [watcher])

    def parent(self):
        """Tags and params of the sweep's run."""
        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("tiny").experiment_id
        (run,) = client.search_runs([experiment], filter_string="tags.dpsweep.sweep = 'tiny'")
        return run.data.tags, run.data.params

    def spooled(self):
        """Kinds of the events in the spool, with the number of a trial's."""
        lines = (self.folder.path / "spool.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [(e["kind"], e.get("number")) for e in events], events


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """An empty MLflow database: making one takes seconds."""
    place = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{place}").search_experiments()
    return place


@pytest.fixture
def world(tmp_path, sweep_file, store):
    return World(tmp_path, sweep_file, store)


def run_one(driver, trial_id, accuracy=0.5):
    assert driver.assign_trial(trial_id) is not None
    end_one(driver, trial_id, accuracy)


def end_one(driver, trial_id, accuracy=0.5):
    message = {"row": ROW | {"valid/accuracy": accuracy}, "end": "complete"}
    driver.take_report(trial_id, message)
    driver.end_trial(trial_id, message)


def test_the_plans_statement_is_delivered_before_the_next_trial_is_dispatched(world):
    tracker, watcher = world.session("budget.trials=1")
    with world.folder.lease() as lease:
        run_one(world.driver(watcher, lease), "a")
    assert tracker.close()
    assert "all 1 planned runs" in world.parent()[0]["mlflow.note.content"]

    tracker, watcher = world.session("budget.trials=5")
    tags, params = world.parent()  # and no trial has been dispatched
    run = get_charged_run(world.study.record(0))
    figure = f"({format_epsilon(compose_runs([run] * 5, world.study.sweep.written.delta))}, "
    for words in (
        tags["dpsweep.privacy"],
        tags["mlflow.note.content"],
        (world.folder.path / "privacy.md").read_text(),
    ):
        assert "The search of all 5 planned runs over a public test split" in words
        assert figure in words
        assert "raised when results could be seen: from 1 to 5 when 1 had begun" in words
    assert tags["dpsweep.grown"] == "from 1 to 5 when 1 had begun"
    assert (params["budget.trials"], tags["dpsweep.param.budget.trials"]) == ("1", "5")
    with world.folder.lease() as lease:
        driver = world.driver(watcher, lease)
        for trial_id in "bcd":
            run_one(driver, trial_id)
        driver.assign_trial("e")  # and this driver dies: nothing more is said of the sweep
    assert tracker.flush(60)
    assert world.parent()[0] == tags
    assert "The search of 5 independent trials" in describe_search_privacy(world.study)
    assert figure in describe_search_privacy(world.study)
    assert tracker.close()
    assert tracker.refused is None


def test_a_dead_server_holds_no_trial_up_and_the_statement_waits_ahead_of_it(world, monkeypatch):
    monkeypatch.setattr(place, "_DELIVERY_SECONDS", 10**6)  # waiting for it would never end
    tracker, watcher = world.session("budget.trials=1")
    with world.folder.lease() as lease:
        run_one(world.driver(watcher, lease), "a")
    assert tracker.close()

    def away(events):
        raise ConnectionError("nobody answers")

    tracker, watcher = world.session("budget.trials=5", deliver=away)
    with world.folder.lease() as lease:
        world.driver(watcher, lease).assign_trial("b")
    kinds, events = world.spooled()
    assert kinds.index(("sweep", None)) < kinds.index(("trial", 1))
    assert "all 5 planned runs" in events[kinds.index(("sweep", None))]["note"]
    assert not tracker.close(0)
    assert "all 1 planned runs" in world.parent()[0]["mlflow.note.content"]
    tracker, _ = world.session("budget.trials=5")
    assert "all 5 planned runs" in world.parent()[0]["mlflow.note.content"]
    assert tracker.close()


def test_runs_beyond_the_plan_are_stated_before_they_are_dispatched(world):
    """A grown search finds another best, whose repeats come on top of those that ran."""
    confirm = "confirm={top: 1, seeds: 2}"
    tracker, watcher = world.session("budget.trials=1", confirm)
    with world.folder.lease() as lease:
        driver = world.driver(watcher, lease)
        for trial_id in "abc":
            run_one(driver, trial_id)
    assert tracker.close()
    tracker, watcher = world.session("budget.trials=2", confirm)
    assert world.study.sweep.num_runs == 4
    with world.folder.lease() as lease:
        driver = world.driver(watcher, lease)
        run_one(driver, "d", 0.9)
        for trial_id in "ef":
            assert driver.assign_trial(trial_id) is not None
            stated = world.parent()[0]["dpsweep.privacy"]
            spent = [get_charged_run(record) for record in world.study.records()]
            figure = compose_runs(spent, world.study.sweep.written.delta)
            composed = re.search(r"among them: \(([\d.]+), ", stated)
            assert float(composed[1]) >= figure
            end_one(driver, trial_id)
    assert "The search of all 6 planned runs" in stated
    assert tracker.close()


def test_a_test_secret_voids_the_statement_before_its_trial_is_dispatched(world, monkeypatch):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "x")
    tracker, watcher = world.session("budget.trials=1")
    with world.folder.lease() as lease:
        world.driver(watcher, lease).assign_trial("a")
    kinds, events = world.spooled()
    before = events[: kinds.index(("trial", 0))]
    assert "VOID" in [e for e in before if e["kind"] == "sweep"][-1]["note"]
    assert tracker.close()
    tags, _ = world.parent()
    assert (tags["privacy"], tags["dpsweep.epsilon"]) == ("void", "none (void)")


def test_a_plan_that_grew_before_any_run_began_is_the_plan(world):
    tracker, _ = world.session("budget.trials=3")
    assert world.study.plans == ((3, 0),)
    assert "raised" not in describe_search_privacy(world.study, planned=True)
    assert tracker.close()


def test_a_sweep_of_an_earlier_version_that_grows_is_told_as_well(world, monkeypatch):
    """It has no note of what was planned when it was launched, but for its file."""
    sweep = load_sweep(world.file, ["name=old", "budget.trials=1"])
    folder = world.state.sweep("old")
    folder.create(sweep.file, sweep.base, None)
    with monkeypatch.context() as earlier:
        earlier.setattr(Study, "note_plan", lambda self: None)
        study = Study.create(folder.storage_uri, sweep, folder.id)
    study.dispatch(study.ask(), void=False)
    assert study.plans == ()
    grown = load_sweep(world.file, ["name=old", "budget.trials=4"])
    with reopen_session("old", world.state, file=grown, accept=True) as session:
        assert session.study.plans == ((1, 1), (4, 1))
        assert session.study.num_to_ask() == 3
        assert "from 1 to 4 when 1 had begun" in describe_search_privacy(session.study)
    with reopen_session("old", world.state) as session:
        assert session.study.plans == ((1, 1), (4, 1)), "once"


def test_a_run_has_what_was_searched_as_params_and_its_whole_config_as_a_file(world):
    tracker, watcher = world.session("budget.trials=1")
    with world.folder.lease() as lease:
        run_one(world.driver(watcher, lease), "a")
    assert tracker.close()
    client = MlflowClient(world.uri)
    experiment = client.get_experiment_by_name("tiny").experiment_id
    (run,) = client.search_runs([experiment], filter_string="tags.`dpsweep.trial` = 'tiny/0'")
    assert set(run.data.params) == {
        "method.kappa",
        "optimizer.lr",
        "optimizer.total_step",
        "method.name",
        "train.batch_size",
        "train.epochs",
        "privacy.clip_norm",
        "privacy.epsilon",
    }
    names = [file.path for file in client.list_artifacts(run.info.run_id)]
    assert names == ["trial.yaml"]
    place = client.download_artifacts(run.info.run_id, "trial.yaml")
    assert load_trial(read_yaml(place)) == world.study.record(0).config


def test_a_pruned_trial_does_not_look_failed(world):
    tracker, watcher = world.session("budget.trials=2")
    for end in ("pruned", "failed"):
        record = world.study.ask()
        world.study.report(record.number, ROW)
        watcher.on_trial_start(record)
        watcher.on_trial_end(world.study.tell(record.number, end))
    assert tracker.close()
    client = MlflowClient(world.uri)
    experiment = client.get_experiment_by_name("tiny").experiment_id
    runs = client.search_runs([experiment], filter_string="tags.`dpsweep.trial` LIKE 'tiny/%'")
    looks = {run.data.tags["dpsweep.state"]: run.info.status for run in runs}
    assert looks == {"pruned": "FINISHED", "failed": "FAILED"}
