"""Adapters from Ray Tune's callbacks to the driver. No decision is made here.

Tune's own search and early stopping keep their state in the driver's memory; ours is in the
study, so that a new Tuner after a crash goes on where the old one was.
"""

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from dpsweep.execution.driver import Driver
from dpsweep.execution.elastic import ClusterNodes
from dpsweep.execution.worker import PAYLOAD, Assignment

_LOOK_SECONDS = 0.5

_FAILURE = "Failure # "
"""Beginning of each entry in Tune's file of a trial's errors."""


class StudySearcher(Searcher):
    """Suggestions come from the study, and ends go back to it."""

    def __init__(self, driver: Driver, nodes: ClusterNodes) -> None:
        super().__init__(metric=None, mode=None)
        self._driver, self._nodes = driver, nodes

    def suggest(self, trial_id: str) -> Assignment | str | None:
        """The next assignment, None while there is none, FINISHED when there will be none."""
        # Tune asks at each of its steps: what is left is read from the study only if that decides
        if self._is_full() and (self._driver.is_waiting or self._driver.num_left()):
            return None
        if assignment := self._driver.assign_trial(trial_id):
            return assignment
        return None if self._driver.is_waiting else str(Searcher.FINISHED)

    def _is_full(self) -> bool:
        """True if no node has room for one more trial."""
        if self._driver.stopping:
            return False
        avoided = self._driver.avoided_nodes()
        return self._driver.num_running >= self._nodes.count_trials(avoided)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tune is through with a trial."""
        self._driver.end_trial(trial_id, None if error else _get_payload(result or {}))

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the study is on disk."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


class StudyScheduler(FIFOScheduler):
    """Every result goes to the driver, which says whether the trial goes on."""

    def __init__(self, driver: Driver, nodes: ClusterNodes) -> None:
        super().__init__()
        self._driver, self._nodes = driver, nodes

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Keep a trial from the nodes that it avoids, before it is placed."""
        super().on_trial_add(tune_controller, trial)
        if nodes := self._driver.avoided_nodes(trial.trial_id) | self._nodes.list_refused():
            trial.update_resources(place_elsewhere(trial.placement_group_factory, nodes))

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """CONTINUE or STOP."""
        ends = self._driver.take_report(trial.trial_id, _get_payload(result))
        return str(TrialScheduler.STOP if ends else TrialScheduler.CONTINUE)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """A worker process died; Tune starts another one, or has given up."""
        if trial.error_file and Path(trial.error_file).exists():
            *_, newest = Path(trial.error_file).read_text(errors="replace").split(_FAILURE)
            self._driver.note_worker_death(trial.trial_id, newest)


class StopOnRequest(Stopper):
    """Ends the whole run when a signal came, or the stop file is there."""

    def __init__(self, driver: Driver, nodes: ClusterNodes, request: Path) -> None:
        self._driver, self._nodes, self._request = driver, nodes, request
        self._looked = 0.0

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No trial is stopped for its own result here."""
        return False

    def stop_all(self) -> bool:
        """True once somebody asked."""
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            if self._request.exists():
                self._driver.stop()
            self._nodes.update()
            self._driver.move_from(self._nodes.draining)
            self._nodes.request(lambda: self._driver.num_running + self._driver.num_left())
        return self._driver.must_end


def place_elsewhere(
    placed: tune.PlacementGroupFactory, nodes: Collection[str]
) -> tune.PlacementGroupFactory:
    """The same resources, on none of `nodes`."""
    away = {"ray.io/node-id": f"!in({','.join(sorted(nodes))})"}  # Ray's label of each node
    bundles = placed.bundles
    return tune.PlacementGroupFactory(bundles, bundle_label_selector=[away] * len(bundles))


def make_trial_name(trial: Trial) -> str:
    """Make Tune's name of a trial: its number in the study and the attempt's id."""
    return f"trial-{trial.config.get('number', 0):04d}-{trial.trial_id[-5:]}"


def _get_payload(result: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(result.get(PAYLOAD, "{}"))
    return message
