"""The driver runs what is left, once each, and what it is told survives whatever ends it."""

import shutil
import warnings
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_for

from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import StateError
from dpsweep.execution import driver as place
from dpsweep.execution.driver import MAX_WORKER_DEATHS, Driver
from dpsweep.execution.failures import note_begin, note_memory, read_memory_notes
from dpsweep.search.charge import get_charged_run
from dpsweep.store.lease import LeaseTiming
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study
from dpsweep.training.loop import Paused, train
from dpsweep.training.schedule import TrialSchedule, resolve_trial_schedule
from dpsweep.training.trial_dir import TrialDir

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient

    from dpsweep.execution.tracking import TrackingWatcher
    from dpsweep.tracking.mlflow import MlflowSink
    from dpsweep.tracking.tracker import Tracker


class Died(BaseException):
    """What a test does to a driver."""


class Heard:
    """A watcher that writes down what it hears, and what the study knew by then."""

    def __init__(self, study):
        self.study, self.events = study, []

    def on_trial_start(self, record):
        assert self.study.record(record.number).dispatched, "charged before anybody hears"
        self.events.append(("started", record.number))

    def on_trial_report(self, record, row):
        assert self.study.record(record.number).row == row == record.row
        self.events.append(("reported", record.number, row["epoch"]))

    def on_trial_end(self, record):
        assert self.study.record(record.number) == record
        self.events.append((record.state, record.number))


class World:
    """A sweep on disk, and drivers of it one after the other."""

    def __init__(self, state, sweep):
        self.sweep, self.folder = sweep, state.sweep(sweep.name)
        self.folder.create(sweep.file, sweep.base, None)
        self.study = Study.create(state.storage_uri, sweep, self.folder.id)
        self.heard, self._ids = Heard(self.study), count()

    def drive(self, *watchers, pace=None, nodes=None):
        """The lease, to be entered, and what makes a driver of it, on nodes: id -> host."""
        lease = self.folder.lease(pace) if pace else self.folder.lease()

        def driver(held):
            self.study = Study.open(self.folder.storage_uri, self.sweep, self.folder.id)
            self.heard.study = self.study
            return Driver(
                self.study, self.folder, held, [self.heard, *watchers], lambda: nodes or {}
            )

        return lease, driver

    def trial_dir(self, number):
        return TrialDir(self.folder.trial_dir(number))


@pytest.fixture
def world(tmp_path, sweep_file):
    def make(*settings):
        return World(StateFolder(tmp_path / "state"), load_sweep(sweep_file, list(settings)))

    return make


def row(epoch, accuracy=0.5):
    return {
        "epoch": epoch,
        "step": 11 * epoch,
        "valid/accuracy": accuracy,
        "valid/loss": 1.0,
        "noise_multiplier": 1.2,
        "privacy/epsilon_spent": 1.0,
        "seconds": 0.5,
    }


def work(driver, trial_id, accuracy=0.5, end="complete"):
    """What a worker says of a trial of two epochs, through Tune."""
    for epoch in (1, 2):
        message = {"row": row(epoch, accuracy)}
        if epoch == 2:
            message["end"] = end
        if driver.take_report(trial_id, message):
            break
    driver.end_trial(trial_id, message)


def test_a_sweep_is_run_from_its_first_trial_to_its_last(world):
    here = world()
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        assert driver.num_left() == 2
        told = [driver.assign_trial("a"), driver.assign_trial("b")]
        assert [t["number"] for t in told] == [0, 1]
        assert driver.assign_trial("c") is None
        assert driver.is_waiting, "one of them may have to be run again"
        for one, record in zip(told, here.study.records(), strict=True):
            assert TrialConfig.model_validate(one["config"]) == record.config
            assert TrialSchedule.from_json(one["schedule"]) == resolve_trial_schedule(record.config)
            assert Path(one["trial_dir"]) == here.trial_dir(record.number).path
            assert (here.trial_dir(record.number).path / "secret").exists()
            assert record.charged
            assert Path(one["pause"][0]) == here.folder.stop_request
            assert Path(one["pause"][1]).parent == here.trial_dir(record.number).path
        for trial_id in "ab":
            work(driver, trial_id)
        assert (driver.num_left(), driver.stopping, driver.trouble) == (0, False, None)
    assert here.study.is_finished()
    assert [r.state for r in here.study.records()] == ["complete"] * 2
    one = [("reported", 0, 1), ("reported", 0, 2), ("complete", 0)]
    other = [("reported", 1, 1), ("reported", 1, 2), ("complete", 1)]
    assert here.heard.events == [("started", 0), ("started", 1), *one, *other]
    assert not list(here.folder.path.rglob("secret"))


def test_a_failed_trial_says_why_and_its_secret_is_gone(world):
    here = world()
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        driver.assign_trial("a")
        driver.end_trial("a", {"end": "failed", "reason": "it diverged"})
        driver.assign_trial("b")
        for _ in range(MAX_WORKER_DEATHS + 1):
            note_begin(here.trial_dir(1).path, "n1")
        driver.end_trial("b", None)
        assert not driver.stopping
        assert driver.assign_trial("c") is None
    assert [(r.state, r.reason) for r in here.study.records()] == [
        ("failed", "it diverged"),
        (
            "failed",
            "its worker process died again and again; the last time: it was killed from outside: "
            "by somebody, or by the system for want of memory (dmesg on its node tells). "
            "resources.memory ends it before that",
        ),
    ]
    assert not list(here.folder.path.rglob("secret"))


def fail(here, driver, trial_id, reason, *, stepped=False):
    """A trial that fails, in its own folder, before or after its first step."""
    number = driver.assign_trial(trial_id)["number"]
    if stepped:
        here.trial_dir(number).note_first_step()
    folder = here.trial_dir(number).path
    driver.end_trial(trial_id, {"end": "failed", "reason": reason.format(folder=folder)})


def test_a_sweep_stops_after_two_equal_failures_before_a_first_step_and_loses_no_trial(world):
    here = world("budget.trials=4")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        fail(here, driver, "a", "no data; see {folder}/error.txt")
        assert not driver.stopping
        secret = (here.trial_dir(0).path / "secret").read_bytes()
        note_memory(here.trial_dir(1).path, "on the GPU")
        fail(here, driver, "b", "no data; see {folder}/error.txt")
        assert driver.stopping
        assert "2 trials failed the same way before their first step: no data" in driver.trouble
        assert "go on with: dpsweep resume tiny" in driver.trouble
        assert driver.assign_trial("c") is None
    assert [r.state for r in here.study.records()] == ["running", "running"]
    here.folder.remove_leftovers()
    lease, make = here.drive()
    with lease as held:  # mended: the same trials run with the secrets that they have
        driver = make(held)
        for trial_id in "abcd":
            assert not read_memory_notes(Path(driver.assign_trial(trial_id)["trial_dir"]))
        assert (here.trial_dir(0).path / "secret").read_bytes() == secret
        for trial_id in "abcd":
            work(driver, trial_id)
        assert driver.assign_trial("e") is None
    assert [r.state for r in here.study.records()] == ["complete"] * 4


@pytest.mark.parametrize("later", ["another reason", "a step", "a report of another trial"])
def test_other_failures_stop_no_sweep(world, later):
    here = world("budget.trials=3")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        if later == "a report of another trial":
            driver.assign_trial("z")
            driver.take_report("z", {"row": row(1)})
            driver.end_trial("z", {"end": "failed", "reason": "it diverged"})
        fail(here, driver, "a", "no data", stepped=later == "a step")
        fail(here, driver, "b", "no data" if later != "another reason" else "no model")
        assert not driver.stopping
        if later != "a report of another trial":
            driver.assign_trial("c")
            work(driver, "c")
        assert driver.assign_trial("d") is None
    ends = [r.state for r in here.study.records()]
    assert sorted(ends) in (["complete", "failed", "failed"], ["failed"] * 3)
    assert here.study.is_finished()
    assert not list(here.folder.path.rglob("secret"))


def test_a_trial_that_no_worker_lived_to_begin_is_handed_out_again(world):
    here = world("budget.trials=1")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        secret = Path(driver.assign_trial("a")["trial_dir"], "secret").read_bytes()
        for _ in range(MAX_WORKER_DEATHS):  # one of those that died had not begun
            note_begin(here.trial_dir(0).path, "n1")
        driver.end_trial("a", None)
        assert not driver.stopping
        told = driver.assign_trial("b")
        assert told["number"] == 0
        assert Path(told["trial_dir"], "secret").read_bytes() == secret
        work(driver, "b")
    (record,) = here.study.records()
    assert record.state == "complete"


def test_a_cluster_on_which_no_worker_lives_stops_the_sweep_and_loses_nothing(world):
    here = world("budget.trials=1")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        for trial_id in count():
            if driver.stopping:
                break
            assert driver.assign_trial(str(trial_id))["number"] == 0
            driver.end_trial(str(trial_id), None)
        assert 1 < trial_id < 10
        assert "worker processes die before they begin a trial" in driver.trouble
    (record,) = here.study.records()
    assert record.state == "running"
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        assert driver.assign_trial("x")["number"] == 0
        work(driver, "x")
    assert here.study.is_finished()


def test_a_trial_that_ends_without_a_word_has_failed(world):
    here = world()
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        driver.assign_trial("a")
        here.trial_dir(0).note_first_step()
        driver.end_trial("a", {"row": row(1)})
        driver.end_trial("a", {"end": "complete"})  # nobody knows that id any more
        driver.end_trial("never begun", {"end": "complete"})
        assert not driver.take_report("a", {"row": row(2)})
    (record,) = here.study.records()
    assert (record.state, record.reason) == ("failed", "it ended without a result")
    assert here.heard.events == [("started", 0), ("failed", 0)]


def test_a_trial_that_does_badly_is_pruned_but_not_after_its_last_step(world):
    here = world("budget.trials=6", "pruner.name=median")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        for trial_id in "abcd":
            driver.assign_trial(trial_id)
            work(driver, trial_id, accuracy=0.9)
        driver.assign_trial("e")
        assert driver.take_report("e", {"row": row(1, 0.1)})
        driver.end_trial("e", {"row": row(1, 0.1)})
        driver.assign_trial("f")
        assert not driver.take_report("f", {"row": row(1, 0.95)})
        assert not driver.take_report("f", {"row": row(2, 0.1), "end": "complete"})
        driver.end_trial("f", {"row": row(2, 0.1), "end": "complete"})
    assert [r.state for r in here.study.records()][4:] == ["pruned", "complete"]


def test_trials_that_were_left_behind_come_first_in_order_with_their_own_secrets(world):
    here = world("budget.trials=4")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        first = [driver.assign_trial(trial_id) for trial_id in "abc"]
        work(driver, "b")
    secrets = {n: here.trial_dir(n).secret() for n in (0, 2)}
    here.heard.events.clear()
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        assert driver.num_left() == 3
        again = [driver.assign_trial(trial_id) for trial_id in "xyz"]
        assert driver.assign_trial("w") is None
    assert [a["number"] for a in again] == [0, 2, 3]
    assert again[:2] == [first[0], first[2]]
    assert {n: here.trial_dir(n).secret() for n in (0, 2)} == secrets
    assert here.heard.events == [("started", 0), ("started", 2), ("started", 3)]


@pytest.mark.parametrize(
    ("payload", "trouble"),
    [
        ({"end": "paused"}, None),
        ({"end": "halted", "reason": "the disk is full"}, "the disk is full"),
    ],
)
def test_a_trial_that_paused_or_halted_is_still_running_and_the_sweep_stops(
    world, payload, trouble
):
    here = world("budget.trials=3")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        driver.assign_trial("a")
        driver.assign_trial("b")
        driver.take_report("a", {"row": row(1)})
        assert not here.folder.stop_request.exists()
        driver.end_trial("a", payload)
        assert here.folder.stop_request.exists(), "the other worker is asked to pause"
        assert (driver.stopping, driver.must_end, driver.trouble) == (True, False, trouble)
        assert driver.assign_trial("c") is None
        driver.end_trial("b", {"end": "paused"})  # says nothing of trouble
        assert (driver.must_end, driver.trouble) == (True, trouble)
        assert not driver.is_waiting
    assert here.study.running() == [0, 1]
    assert here.study.record(0).row["epoch"] == 1
    assert all((here.trial_dir(n).path / "secret").exists() for n in (0, 1))
    assert here.heard.events == [("started", 0), ("started", 1), ("reported", 0, 1)]
    with here.folder.lease():
        assert not here.folder.stop_request.exists(), "the next driver is not asked to stop"


@pytest.mark.parametrize("payload", [None, {}, {"row": row(1)}])
def test_a_worker_that_is_killed_while_the_sweep_stops_leaves_its_trial_running(world, payload):
    here = world()
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        driver.assign_trial("a")
        driver.stop()
        driver.end_trial("a", payload)
        assert (driver.must_end, driver.trouble) == (True, None)
    assert here.study.running() == [0]


def test_a_trial_that_completes_while_the_sweep_stops_is_complete(world):
    here = world()
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        driver.assign_trial("a")
        driver.stop()
        work(driver, "a")
    assert here.study.record(0).state == "complete"
    assert not here.study.is_finished()


def test_trials_that_do_not_pause_are_waited_for_no_longer_than_their_time(world, monkeypatch):
    now = 0.0
    monkeypatch.setattr(place, "time", SimpleNamespace(monotonic=lambda: now))
    here = world()
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        driver.assign_trial("a")
        assert not driver.must_end
        driver.stop()
        now += place._GRACE_SECONDS
        assert not driver.must_end
        now += 1
        driver.stop()  # a second signal does not begin their time anew
        assert driver.must_end


def test_after_its_hours_nothing_new_starts_but_what_was_left_is_finished(world):
    here = world("budget={trials: 3, hours: 1.0e-9}")
    asked = here.study.ask()
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        assert driver.assign_trial("a")["number"] == asked.number
        work(driver, "a")
        assert driver.assign_trial("b") is None
        assert not driver.is_waiting
    assert here.study.num_asked() == 1


def test_repeats_wait_for_the_search_and_run_beside_each_other(world):
    here = world("budget.trials=3", "confirm={top: 1, seeds: 3}")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        assert driver.num_left() == 6
        for trial_id in "abc":
            driver.assign_trial(trial_id)
        work(driver, "a", 0.5)
        work(driver, "b", 0.9)
        assert driver.assign_trial("d") is None, "the last trial may still be the best"
        assert driver.is_waiting
        work(driver, "c", 0.6)
        assert not driver.is_waiting
        repeats = [driver.assign_trial(trial_id) for trial_id in "def"]
        assert [r["number"] for r in repeats] == [3, 4, 5]
        best = here.study.record(1).config.model_dump(mode="json")
        assert [{**r["config"], "seed": best["seed"]} for r in repeats] == [best] * 3
        keys = {here.trial_dir(n).secret().key for n in (3, 4, 5)}
        assert len(keys) == 3, "fresh noise each"
        assert driver.assign_trial("g") is None
        assert driver.is_waiting, "one of them may have to be run again"
        for trial_id in "def":
            work(driver, trial_id, 0.4)
        assert driver.num_left() == 0
    assert here.study.is_finished()
    assert [r.confirms for r in here.study.records()] == [None] * 3 + [1] * 3


def test_a_search_without_a_complete_trial_ends_without_repeats(world):
    here = world("confirm={top: 1, seeds: 2}")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        for trial_id in "ab":
            driver.assign_trial(trial_id)
        driver.end_trial("a", {"end": "failed", "reason": "x"})
        assert driver.assign_trial("c") is None
        assert driver.is_waiting
        driver.end_trial("b", {"end": "failed", "reason": "y"})
        assert driver.assign_trial("c") is None
        assert not driver.is_waiting
    assert here.study.is_finished()


def test_a_trial_whose_memory_ran_out_is_run_once_more_when_no_other_runs(world, caplog):
    here = world("budget.trials=3")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        first = [driver.assign_trial(trial_id) for trial_id in "ab"]
        assert not any(one["limits"]["alone"] for one in first)
        secret, spent = here.trial_dir(0).secret(), here.study.record(0).charged
        driver.end_trial("a", {"end": "memory", "reason": "memory ran out on the GPU"})
        assert "trial 0: memory ran out on the GPU; it is run once more, alone" in caplog.text
        assert here.study.running() == [0, 1]
        assert driver.assign_trial("c")["number"] == 2, "new ones begin before that"
        work(driver, "b")
        assert driver.assign_trial("d") is None, "not beside trial 2"
        assert driver.is_waiting
        assert driver.num_left() == 1
        work(driver, "c")
        again = driver.assign_trial("d")
        assert (again["number"], again["limits"]["alone"]) == (0, True)
        assert again["config"] == first[0]["config"], "its secret is bound to that"
        assert (here.trial_dir(0).secret(), here.study.record(0).charged) == (secret, spent)
        assert driver.assign_trial("e") is None
        work(driver, "d")
        assert not driver.is_waiting
    assert here.study.is_finished()
    assert [r.state for r in here.study.records()] == ["complete"] * 3
    assert [e for e in here.heard.events if e[0] == "started"] == [
        *(("started", n) for n in (0, 1, 2, 0))
    ]


def test_nothing_runs_beside_a_trial_that_is_to_run_alone(world):
    here = world("confirm={top: 1, seeds: 2}")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        for trial_id in "ab":
            driver.assign_trial(trial_id)
        work(driver, "a")
        driver.end_trial("b", {"end": "memory"})
        assert driver.assign_trial("c")["number"] == 1
        assert driver.assign_trial("d") is None, "nor do repeats begin: it may be the best"
        work(driver, "c", 0.9)
        assert [driver.assign_trial(t)["number"] for t in "ef"] == [2, 3]
    assert {here.study.record(n).confirms for n in (2, 3)} == {1}


def test_a_driver_that_takes_over_knows_whose_memory_ran_out(world):
    here = world("budget.trials=2")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        for trial_id in "ab":
            driver.assign_trial(trial_id)
        driver.stop()
        driver.end_trial("a", {"end": "memory", "reason": "x"})
        assert driver.trouble is None
    note_memory(here.trial_dir(0).path, "on the GPU")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        told = driver.assign_trial("x")
        assert (told["number"], told["limits"]["alone"]) == (1, False)
        work(driver, "x")
        told = driver.assign_trial("y")
        assert (told["number"], told["limits"]["alone"]) == (0, True)


def test_a_worker_that_ray_ends_for_memory_is_noted_and_no_other_death_is(world):
    here = world()
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        driver.assign_trial("a")
        driver.note_worker_death(
            "a", "Some common causes include: (1) the process was killed by the OOM killer"
        )
        assert read_memory_notes(here.trial_dir(0).path) == []
        driver.note_worker_death(
            "a", "2 worker(s) were killed due to the node running low on memory. x"
        )
        driver.note_worker_death("unknown", "killed due to the node running low on memory")
        assert read_memory_notes(here.trial_dir(0).path) == [
            "on its node, where Ray ended the worker"
        ]


def test_a_worker_is_held_to_what_the_file_says(world):
    here = world("budget.trial_timeout=30m", "resources={memory: 2GB, gpu: 0.25}")
    lease, make = here.drive()
    with lease as held:
        told = make(held).assign_trial("a")
    assert told["limits"] == {
        "silence_seconds": 1800.0,
        "memory_bytes": 2_000_000_000,
        "gpu_share": pytest.approx(0.9 * 0.25),
        "num_devices": 1,
        "alone": False,
    }


def test_nothing_is_waited_for_once_the_sweep_stops(world):
    here = world("confirm={top: 1, seeds: 2}")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        for trial_id in "ab":
            driver.assign_trial(trial_id)
        assert driver.is_waiting
        driver.stop()
        assert not driver.is_waiting


def test_a_driver_whose_lease_is_lost_writes_nothing_more(world):
    here = world("budget.trials=3")
    lease, make = here.drive(pace=LeaseTiming(beat_seconds=0.05))
    with lease as held:
        driver = make(held)
        driver.assign_trial("a")
        (here.folder.path / "lease").unlink()  # as somebody who takes over does
        wait_for(held.is_lost, "the loss of the lease")
        before = files(here)
        words = r"another process drives the sweep now: .* writes nothing more"
        for call in (
            lambda: driver.assign_trial("b"),
            lambda: driver.take_report("a", {"row": row(1)}),
            lambda: driver.end_trial("a", {"row": row(2), "end": "complete"}),
        ):
            with pytest.raises(StateError, match=words):
                call()
        driver.stop()  # Ctrl-C; the other driver is not asked to stop by it
        assert driver.stopping
        assert files(here) == before
    assert here.study.record(0).row is None
    assert here.study.num_asked() == 1
    assert here.heard.events == [("started", 0)]


def files(here):
    """Every file of the sweep's folder but those of the lease."""
    found = [p for p in here.folder.path.rglob("*") if p.is_file()]
    return {p: p.read_bytes() for p in found if "lease" not in p.name}


class Falls:
    """A watcher that dies the first time a trial ends."""

    def __init__(self):
        self.ends = 0

    def on_trial_start(self, record):
        pass

    def on_trial_report(self, record, row):
        pass

    def on_trial_end(self, record):
        self.ends += 1
        if self.ends == 1:
            raise Died


@pytest.mark.filterwarnings("ignore")
def test_what_the_tracker_did_not_hear_is_made_good_and_each_trial_is_tracked_once(
    world, tmp_path, monkeypatch
):
    """Real training, and a driver that dies between the study and its watchers."""
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "driver")
    here = world("confirm={top: 1, seeds: 2}", "budget.trials=1")
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    def tracked(*, falls):
        sink = MlflowSink(uri, here.sweep.name, here.folder.id, tmp_path / "artifacts")
        tracker = Tracker(here.folder.path, sink)
        watcher = TrackingWatcher(tracker, here.study, here.folder)
        watcher.reconcile()
        lease, make = here.drive(*([Falls()] if falls else []), watcher)
        try:
            with lease as held:
                driver = make(held)
                while assignment := driver.assign_trial(trial_id := f"t{next(here._ids)}"):
                    trained(driver, trial_id, assignment)
        finally:
            assert tracker.close()
            assert tracker.refused is None

    with pytest.raises(Died):
        tracked(falls=True)
    assert here.study.record(0).state == "complete"
    assert not (here.trial_dir(0).path / "secret").exists()
    assert runs(uri)["trial-0000"].info.status == "RUNNING"
    tracked(falls=False)
    found = runs(uri)
    assert found.keys() == {"tiny", "trial-0000", "trial-0001", "trial-0002"}
    for number in range(3):
        run, record = found[f"trial-{number:04d}"], here.study.record(number)
        assert (run.info.status, record.state) == ("FINISHED", "complete")
        assert run.data.tags["dpsweep.state"] == "complete"
        assert run.data.tags.get("dpsweep.confirms") == (None if number == 0 else "0")
        assert "VOID" in run.data.tags["mlflow.note.content"]
        assert run.data.metrics["valid/accuracy"] == record.value
        history = MlflowClient(uri).get_metric_history(run.info.run_id, "valid/accuracy")
        steps = [m.step for m in history]
        assert (len(steps), steps[-1]) == (2, record.row["step"])
        assert 0 < steps[0] < steps[-1]


def trained(driver, trial_id, assignment):
    """What execution/worker.py does with an assignment, but for Ray."""
    rows = train(
        TrialConfig.model_validate(assignment["config"]),
        TrialDir(Path(assignment["trial_dir"])),
        lambda row: driver.take_report(trial_id, {"row": row}),
        Path(assignment["pause"][0]).exists,
        TrialSchedule.from_json(assignment["schedule"]),
    ).rows
    driver.end_trial(trial_id, {"row": rows[-1], "end": "complete"})


def runs(uri):
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tiny").experiment_id
    found = client.search_runs([experiment])
    assert len({label(run) for run in found}) == len(found), "a trial has two runs"
    return {label(run): run for run in found}


def label(run):
    """A run's name without what is told of its config: trial-0007, or the sweep's name."""
    tag = run.data.tags.get("dpsweep.trial")
    return f"trial-{int(tag.rpartition('/')[2]):04d}" if tag else run.info.run_name


def test_a_stop_reaches_a_trial_in_training_and_the_next_driver_ends_it(world, monkeypatch):
    monkeypatch.setattr("dpsweep.training.loop._LOOK_SECONDS", 0.0)
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "driver")
    here = world("budget.trials=1")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        assignment = driver.assign_trial("a")
        driver.stop()
        with pytest.raises(Paused):
            trained(driver, "a", assignment)
        driver.end_trial("a", {"end": "paused"})
        assert driver.must_end
    assert here.trial_dir(0).load()["progress"]["step"] == 1
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        trained(driver, "b", driver.assign_trial("b"))
    assert here.study.is_finished()
    assert [e for e in here.heard.events if e[0] == "reported"] == [
        ("reported", 0, 1),
        ("reported", 0, 2),
    ]
    left = {p.name for p in here.trial_dir(0).path.iterdir()}
    assert left == {"metrics.json", "weights.pt", "confusion.json"}


def test_the_final_run_waits_for_every_exploring_trial_and_is_handed_out_once(world):
    here = world("privacy.scope=sweep", "budget={explore: {trials: 3, share: 0.1}}")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        assert driver.num_left() == 4
        for trial_id in "abc":
            driver.assign_trial(trial_id)
        work(driver, "a", 0.5)
        driver.end_trial("b", {"end": "memory"})
        work(driver, "c", 0.6)
        assert driver.assign_trial("d")["number"] == 1, "it is run again, and may be the best"
        assert driver.assign_trial("e") is None
        work(driver, "d", 0.9)
        final = driver.assign_trial("e")
        assert (final["number"], here.study.record(3).confirms) == (3, 1)
        assert driver.assign_trial("f") is None
        work(driver, "e", 0.4)
        assert driver.num_left() == 0
    assert here.study.is_finished()


_WRITES = ("_add", "dispatch", "report", "tell")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("fatal", range(10, 16))
def test_a_driver_killed_at_any_write_about_the_final_run_loses_and_charges_nothing_twice(
    world, monkeypatch, fatal, after
):
    """Two exploring trials and the final run make 15 writes; from the tenth on, each kills once."""
    here = world("privacy.scope=sweep", "budget={explore: {trials: 2, share: 0.1}}")
    writes = count(1)

    def deadly(write):
        def killed(*args, **kwargs):
            number = next(writes)
            if number == fatal and not after:
                raise Died
            found = write(*args, **kwargs)
            if number == fatal:
                raise Died
            return found

        return killed

    for name in _WRITES:
        monkeypatch.setattr(Study, name, deadly(getattr(Study, name)))
    secrets = dict[int, bytes]()

    def drive_to_the_end():
        lease, make = here.drive()
        with lease as held:
            driver = make(held)
            for trial_id in "abcd":
                if (told := driver.assign_trial(trial_id)) is None:
                    continue
                key = here.trial_dir(told["number"]).secret().key
                assert secrets.setdefault(told["number"], key) == key, "one secret a run"
                work(driver, trial_id, 0.9 if told["number"] == 1 else 0.5)

    with pytest.raises(Died):
        drive_to_the_end()
    drive_to_the_end()
    records = here.study.records()
    assert here.study.is_finished()
    assert [(r.number, r.confirms, r.state) for r in records] == [
        (0, None, "complete"),
        (1, None, "complete"),
        (2, 1, "complete"),
    ]
    assert all(r.charged for r in records)
    assert here.sweep.search_budget.covers([get_charged_run(r) for r in records])
    assert here.study.best()[0].number == 2


def begin_on(here, driver, trial_id, node, *, stepped=False):
    """A trial that a worker of a node begins; its number."""
    number = driver.assign_trial(trial_id)["number"]
    note_begin(here.trial_dir(number).path, node)
    if stepped:
        here.trial_dir(number).note_first_step()
    return number


def fail_on(here, driver, trial_id, node, reason="no GPU", *, stepped=False):
    """A trial that fails on a node; its number."""
    number = begin_on(here, driver, trial_id, node, stepped=stepped)
    driver.end_trial(trial_id, {"end": "failed", "reason": reason})
    return number


def test_a_trial_that_fails_before_its_first_step_goes_elsewhere_with_its_secret(world, caplog):
    here = world("budget.trials=6")
    lease, make = here.drive(nodes={"n1": "one", "n2": "two"})
    with lease as held:
        driver = make(held)
        assert fail_on(here, driver, "a", "n1") == 0
        secret = (here.trial_dir(0).path / "secret").read_bytes()
        charged = here.study.record(0).charged
        assert begin_on(here, driver, "b", "n2") == 0, "the same trial"
        assert driver.avoided_nodes("b") == {"n1"}
        assert (here.trial_dir(0).path / "secret").read_bytes() == secret
        assert here.study.record(0).charged == charged
        driver.take_report("b", {"row": row(1)})
        assert fail_on(here, driver, "c", "n1") == 1
        assert "one (node n1) is avoided: 2 trials failed there so" in caplog.text
        assert begin_on(here, driver, "d", "n2") == 1
        driver.assign_trial("e")
        assert driver.avoided_nodes("e") == {"n1"}, "one that never failed"
        assert not driver.stopping
    assert here.study.record(2).state == "running"


def test_a_trial_that_began_a_step_goes_nowhere(world):
    here = world("budget.trials=2")
    lease, make = here.drive(nodes={"n1": "one", "n2": "two"})
    with lease as held:
        driver = make(held)
        assert fail_on(here, driver, "a", "n1", stepped=True) == 0
        driver.assign_trial("b")
        assert not driver.avoided_nodes("b")
    assert here.study.record(0).state == "failed"


def test_configs_that_fail_on_two_nodes_cost_no_node(world):
    here = world("budget.trials=6")
    lease, make = here.drive(nodes={"n1": "one", "n2": "two"})
    with lease as held:
        driver = make(held)
        begin_on(here, driver, "z", "n1", stepped=True)
        driver.take_report("z", {"row": row(1)})
        for number, (first, second) in enumerate([("n1", "n2"), ("n2", "n1"), ("n1", "n2")], 1):
            assert fail_on(here, driver, f"{number}a", first, "no such head") == number
            assert fail_on(here, driver, f"{number}b", second, "no such head") == number
        driver.assign_trial("y")
        assert not driver.avoided_nodes("y")
        assert not driver.stopping
        driver.take_report("z", {"row": row(2)})
    assert [here.study.record(n).state for n in (1, 2, 3)] == ["failed"] * 3


@pytest.mark.parametrize("reported", [False, True])
def test_a_sweep_whose_only_node_fails_stops_and_loses_no_trial(world, reported):
    here = world("budget.trials=9")
    lease, make = here.drive(nodes={"n1": "one"})
    with lease as held:
        driver = make(held)
        if reported:
            begin_on(here, driver, "z", "n1", stepped=True)
            work(driver, "z")
        for trial_id in "abcd"[: 4 if reported else 2]:
            assert not driver.stopping
            fail_on(here, driver, trial_id, "n1")
        assert driver.stopping
        assert "failed the same way before their first step: no GPU" in driver.trouble
    assert not [r for r in here.study.records() if r.state == "failed"]


@pytest.mark.parametrize("nodes", [["n1"], ["n1", "n2"]])
def test_the_last_node_is_not_avoided_whatever_failed_there(world, nodes):
    """Or no trial would be placed any more, and the sweep wait for a node for ever."""
    here = world("budget.trials=9")
    lease, make = here.drive(nodes={node: node for node in nodes})
    with lease as held:
        driver = make(held)
        begun = [(f"{node}-{i}", node) for node in nodes for i in range(2)]
        for trial_id, node in begun:
            begin_on(here, driver, trial_id, node)
        for trial_id, _ in begun:
            driver.end_trial(trial_id, {"end": "failed", "reason": f"{trial_id} has its own"})
        assert not driver.avoided_nodes()
        number = begin_on(here, driver, "on", nodes[-1], stepped=True)
        assert not driver.avoided_nodes("on")
        work(driver, "on")
        assert not driver.stopping
    assert here.study.record(number).state == "complete"


def test_a_trial_that_fails_again_after_a_resume_has_failed(world):
    """So that a sweep in which some configs cannot work gets on."""
    here = world("budget.trials=2")
    for state in ("running", "failed"):
        lease, make = here.drive(nodes={"n1": "one"})
        with lease as held:
            driver = make(held)
            for trial_id in "ab":
                fail_on(here, driver, trial_id, "n1")
        assert [r.state for r in here.study.records()] == [state] * 2
        here.folder.remove_leftovers()


def test_a_trial_on_a_node_that_is_to_end_saves_its_state_and_goes_on_elsewhere(world):
    here = world("budget.trials=2")
    lease, make = here.drive(nodes={"n1": "one", "n2": "two"})
    with lease as held:
        driver = make(held)
        first, second = driver.assign_trial("a"), driver.assign_trial("b")
        note_begin(here.trial_dir(0).path, "n1")
        note_begin(here.trial_dir(1).path, "n2")
        driver.move_from(frozenset())
        assert not any(Path(p).exists() for one in (first, second) for p in one["pause"])
        driver.move_from({"n1"})
        assert [Path(one["pause"][1]).exists() for one in (first, second)] == [True, False]
        secret = (here.trial_dir(0).path / "secret").read_bytes()
        driver.end_trial("a", {"end": "paused"})
        assert not driver.stopping
        again = driver.assign_trial("c")
        assert (again["number"], driver.num_running) == (0, 2)
        assert not any(Path(p).exists() for p in again["pause"])
        assert (here.trial_dir(0).path / "secret").read_bytes() == secret
        driver.end_trial("b", {"end": "paused"})  # which nobody asked for
        assert driver.stopping


@pytest.mark.parametrize("end", ["complete", "failed"])
def test_a_directory_that_goes_with_a_trial_s_end_does_not_come_back(world, end, monkeypatch):
    """As in a private selection, where the directories left would tell the number of trials."""
    here = world("budget.trials=1")
    lease, make = here.drive()
    with lease as held:
        driver = make(held)
        place = begin_on(here, driver, "a", "n1", stepped=True) or here.trial_dir(0).path
        tell = here.study.tell

        def tell_and_delete(number, *args, **how):
            shutil.rmtree(place)
            return tell(number, *args, **how)

        monkeypatch.setattr(here.study, "tell", tell_and_delete)
        driver.end_trial("a", {"end": end, "reason": "x"})
    assert not place.exists()
