"""Drives a sweep from its first trial, or from where the last driver left it, to its end."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune import TuneError

from dpsweep.compat import find_dashboard
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.core.errors import DpSweepError, Interrupted, StateError, summarize_error
from dpsweep.core.signals import handle_signals
from dpsweep.data.read import fingerprint_images, load_dataset
from dpsweep.execution.changes import check_changes
from dpsweep.execution.driver import MAX_WORKER_DEATHS, Driver, Search, Watcher
from dpsweep.execution.elastic import ClusterNodes, FindFaults
from dpsweep.execution.gauges import GaugeWatcher
from dpsweep.execution.gpu_probe import decide_packing
from dpsweep.execution.private_selection import SecretSearch, forget
from dpsweep.execution.ray_tune import StopOnRequest, StudyScheduler, StudySearcher, make_trial_name
from dpsweep.execution.release_check import is_checked, store_release_checks
from dpsweep.execution.resources import (
    NodeResources,
    count_concurrent_trials,
    make_bundle,
    make_idle_gpu_warning,
    read_packing,
    store_packing,
    with_packing,
)
from dpsweep.execution.tracking import TrackingWatcher
from dpsweep.execution.worker import run_trial
from dpsweep.store.lease import Lease
from dpsweep.store.owner import whoami
from dpsweep.store.retention import BestWeights
from dpsweep.store.state_dir import StateFolder, SweepFolder
from dpsweep.store.statement import is_ex_post, sum_with_earlier
from dpsweep.store.storage import choose_study_name
from dpsweep.store.study import Study, open_study, read_stored_sweep
from dpsweep.tracking.mlflow import MlflowSink
from dpsweep.tracking.server import add_driver, is_server
from dpsweep.tracking.tracker import Tracker
from dpsweep.training.trial_dir import TrialDir

_HASTY_SECONDS = 2.0
"""For delivering results when something is wrong; what is left waits for the next time."""


@dataclass
class Session:
    """A sweep that this process drives."""

    sweep: ResolvedSweep  # what is searched
    folder: SweepFolder  # where it lives
    study: Study  # what is known of its trials
    tracker: Tracker  # where its results go
    lease: Lease  # what makes this process its only driver
    seconds: float = 0.0  # how long trials were run in this session
    # asks a node that joins what is wrong there; None to take every node
    find_faults: FindFaults | None = None

    def prepare(self) -> list[str]:
        """Decide on the connected cluster what `auto` means; what the user should know of that.

        Called a second time, or for a finished sweep, it has nothing to do.

        Raises:
            ConfigError: If the cluster is too small for one trial.
        """
        if self.study.is_finished():
            return []
        nodes, resources = _list_nodes(), self.sweep.config.resources
        if resources.gpu != "auto":
            count_concurrent_trials(resources, nodes)
            words = make_idle_gpu_warning(resources, nodes)
            return [words] if words else []
        packing = read_packing(self.folder.path)
        if packing is None:
            packing = decide_packing(self.sweep, nodes)
            store_packing(self.folder.path, packing)
        self.sweep = self.study.sweep = with_packing(self.sweep, packing)
        count_concurrent_trials(self.sweep.config.resources, nodes)
        return [packing.words]

    def run(self, watchers: list[Watcher]) -> bool:
        """Run what is left on the connected cluster. False if it was stopped before the end.

        A finished sweep needs no cluster: what the tracker does not know is told again.

        Raises:
            Interrupted: If it had to stop, as on a full disk; nothing is lost, and it can go on.
        """
        tracking = TrackingWatcher(self.tracker, self.study, self.folder)
        finished = self.study.is_finished()
        if finished:
            tracking.reconcile()
            self._tidy()
            forget(self.folder)  # a driver may have died between the winner and that
            return True
        self.prepare()
        self.folder.note_dashboard(find_dashboard())
        if not is_checked(self.folder):  # once a sweep, before its first trial
            store_release_checks(self.sweep, self.folder)
        if self.sweep.is_private_selection:
            return self._search(SecretSearch(self.folder, self.sweep), tracking, [])
        # It deletes the weights of every trial that the study does not rank among the best, and
        # before its end a private selection has none there.
        keeper = BestWeights(self.study, self.folder, self.sweep.num_kept)
        gauges = GaugeWatcher(self.study, self.folder.path)
        complete = self._search(self.study, tracking, [tracking, keeper, gauges, *watchers])
        if complete:
            keeper.finish()
        return complete

    def _search(self, search: Search, tracking: TrackingWatcher, watchers: list[Watcher]) -> bool:
        search.begin(tracking.reconcile)
        self._tidy()
        complete = self._drive(search, watchers)
        if complete:
            search.publish(self.study, tracking.reconcile)
        return complete

    def _drive(self, search: Search, watchers: list[Watcher]) -> bool:
        driver = Driver(search, self.folder, self.lease, watchers, lambda: nodes.usable())
        begin = time.monotonic()
        if driver.num_left():  # else no cluster is needed, and none may be connected
            nodes = ClusterNodes(self.sweep.config.resources, self.find_faults)
            with _stop_on_signals(driver), _unwrap_tune_errors(self.sweep.name):
                try:
                    _make_tuner(self.sweep, self.folder, driver, nodes).fit()
                finally:
                    nodes.release()
        self.seconds += time.monotonic() - begin
        self.lease.check()
        self.folder.remove_leftovers()
        if driver.trouble:
            trouble = search.describe_trouble(driver.trouble)
            raise Interrupted(f"sweep {self.sweep.name!r} stopped: {trouble}")
        return not driver.stopping

    def _tidy(self) -> None:
        """Resume state of trials that are through: a driver may die before it deletes it."""
        for record in self.study.records():
            if record.state != "running" and self.folder.trial_dir(record.number).exists():
                TrialDir(self.folder.trial_dir(record.number)).forget()


@contextlib.contextmanager
def create_session(
    sweep: ResolvedSweep,
    state: StateFolder,
    tracking_uri: str | None,
    storage_uri: str | None = None,
) -> Iterator[Session]:
    """A sweep that was never launched; its folder and study are made here.

    Raises:
        StateError: If the name is taken.
        ConfigError: If the connected cluster is too small for one trial, or the data are not
            those that the config declares.
    """
    count_concurrent_trials(sweep.config.resources, _list_nodes())
    images = sweep.written.data.model_copy(update={"features": None})
    load_dataset(images, sweep.written.seed)  # raises before anything is made
    folder, owner = state.sweep(sweep.name), whoami()
    called = choose_study_name(storage_uri, sweep.name, owner)
    tracking_uri = add_driver(tracking_uri) if tracking_uri else None
    folder.create(sweep.file, sweep.base, tracking_uri, storage_uri, called)
    with folder.lease() as lease:
        try:
            study = Study.create(folder.storage_uri, sweep, folder.id, name=called, owner=owner)
            if sweep.config.learn_from:
                earlier = open_study(sweep.config.learn_from, state)
                study.learn_from(earlier, sum_with_earlier(earlier), ex_post=is_ex_post(earlier))
                _check_held_out(state.sweep(sweep.config.learn_from), sweep)
        except DpSweepError:
            folder.remove()
            raise
        _check_data(folder, sweep)
        with _make_session(sweep, state, study, lease) as session:
            yield session


@contextlib.contextmanager
def reopen_session(
    name: str,
    state: StateFolder,
    storage_uri: str | None = None,
    file: ResolvedSweep | None = None,
    *,
    accept: bool = False,
    wait_seconds: float = 0.0,
) -> Iterator[Session]:
    """A sweep that was launched before, with the file it was launched with.

    Args:
        storage_uri: Where its study is now, if not where it was; written down.
        file: What its file says now, if it is to be compared.
        accept: True to take over what changed there, where that does no harm.
        wait_seconds: How long to wait for another driver.

    Raises:
        StateError: If there is none, or another process drives it.
    """
    folder = state.sweep(name)
    folder.read_files()
    with folder.lease(wait_seconds=wait_seconds) as lease:
        uri = storage_uri or folder.storage_uri
        study = Study.open(uri, read_stored_sweep(name, state), folder.id, name=folder.study)
        study.note_plan()  # as it was launched: earlier versions noted none
        if file:
            study.sweep = check_changes(folder, study.sweep, file, accepted=accept)
            study.note_plan()
        sweep = study.sweep
        _check_data(folder, sweep)
        if storage_uri:
            folder.move_storage(storage_uri)
        with _make_session(sweep, state, study, lease) as session:
            yield session


@contextlib.contextmanager
def _make_session(
    sweep: ResolvedSweep, state: StateFolder, study: Study, lease: Lease
) -> Iterator[Session]:
    folder = state.sweep(sweep.name)
    uri = folder.tracking_uri
    artifacts = None if uri and is_server(uri) else state.artifacts / sweep.name
    sink = MlflowSink(
        uri or state.tracking_uri, sweep.name, folder.id, artifacts, folder.owner_name
    )
    session = Session(sweep, folder, study, Tracker(folder.path, sink), lease)
    try:
        yield session
    except BaseException:  # and if the lease is lost, the spool is another's
        session.tracker.close(timeout=0.0 if lease.is_lost() else _HASTY_SECONDS)
        raise
    lease.check()
    session.tracker.close()


def _check_data(folder: SweepFolder, sweep: ResolvedSweep) -> None:
    folder.check_data(_fingerprint(folder, sweep))


def _check_held_out(earlier: SweepFolder, sweep: ResolvedSweep) -> None:
    """Raise StateError if an earlier sweep was measured with what this one trains on."""
    if sweep.written.data.num_held_out and not earlier.has_data(_fingerprint(earlier, sweep)):
        place = sweep.file.at(("learn_from",))
        raise StateError(
            f"{place}: the data are not those of sweep {earlier.name!r}, so other examples were "
            f"held out there. What it measured without noise would be trained on here, and no "
            f"epsilon would cover it. Put the former data back, or leave out --from"
        )


def _fingerprint(folder: SweepFolder, sweep: ResolvedSweep) -> str:
    trial = sweep.written
    with sweep.origin.locating():
        return fingerprint_images(trial.data, trial.seed, folder.data_key())


def _list_nodes() -> list[NodeResources]:
    """List the resources of each node of the connected cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _make_tuner(
    sweep: ResolvedSweep, folder: SweepFolder, driver: Driver, nodes: ClusterNodes
) -> tune.Tuner:
    takes = tune.PlacementGroupFactory([make_bundle(sweep.config.resources)])
    return tune.Tuner(
        tune.with_resources(run_trial, takes),
        tune_config=tune.TuneConfig(
            search_alg=StudySearcher(driver, nodes),
            scheduler=StudyScheduler(driver, nodes),
            num_samples=-1,  # as many as the driver has; some run twice
            reuse_actors=True,
            trial_name_creator=make_trial_name,
            trial_dirname_creator=make_trial_name,
        ),
        run_config=tune.RunConfig(
            name="ray",
            storage_path=str(folder.path),
            verbose=0,
            stop=StopOnRequest(driver, nodes, folder.stop_request),
            failure_config=tune.FailureConfig(max_failures=MAX_WORKER_DEATHS),
        ),
    )


@contextlib.contextmanager
def _unwrap_tune_errors(name: str) -> Iterator[None]:
    """Tune wraps what the driver raises in an error of its own, which has only the words of it.

    Of a cluster that is gone it tells in many ways.
    """
    try:
        yield
    except RayError as e:
        raise Interrupted(
            f"sweep {name!r} stopped: its Ray cluster was lost ({summarize_error(e)}). Nothing "
            f"that was reported is lost. When a cluster is up again: dpsweep resume {name}"
        ) from e
    except TuneError as e:
        cause = e.__context__
        if isinstance(cause, DpSweepError):
            raise cause from cause.__cause__
        raise


@contextlib.contextmanager
def _stop_on_signals(driver: Driver) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C end the run in good order, a second Ctrl-C at once.

    Only a process's main thread hears of signals; in another the run goes on to its end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if driver.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        driver.stop()

    with handle_signals(ask):
        yield
