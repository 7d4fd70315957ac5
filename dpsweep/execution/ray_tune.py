"""Adapters from Ray Tune's callbacks to the driver. No decision is made here.

Tune's own search and early stopping keep their state in the driver's memory; ours is in the
study, so that a new Tuner after a crash goes on where the old one was.
"""

import json
import time
from pathlib import Path
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from dpsweep.execution.driver import Driver
from dpsweep.execution.worker import PAYLOAD, Assignment

_LOOK_SECONDS = 0.5

_FAILURE = "Failure # "
"""Beginning of each entry in Tune's file of a trial's errors."""


class StudySearcher(Searcher):
    """Suggestions come from the study, and ends go back to it."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(metric=None, mode=None)
        self._driver = driver

    def suggest(self, trial_id: str) -> Assignment | str | None:
        """The next assignment, None while there is none, FINISHED when there will be none."""
        if assignment := self._driver.next(trial_id):
            return assignment
        return None if self._driver.is_waiting else str(Searcher.FINISHED)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tune is through with a trial."""
        self._driver.ended(trial_id, None if error else _get_payload(result or {}))

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the study is on disk."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


class StudyScheduler(FIFOScheduler):
    """Every result goes to the driver, which says whether the trial goes on."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """CONTINUE or STOP."""
        ends = self._driver.result(trial.trial_id, _get_payload(result))
        return str(TrialScheduler.STOP if ends else TrialScheduler.CONTINUE)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """A worker process died; Tune starts another one, or has given up."""
        if trial.error_file and Path(trial.error_file).exists():
            *_, newest = Path(trial.error_file).read_text(errors="replace").split(_FAILURE)
            self._driver.handle_worker_death(trial.trial_id, newest)


class StopOnRequest(Stopper):
    """Ends the whole run when a signal came, or the stop file is there."""

    def __init__(self, driver: Driver, request: Path) -> None:
        self._driver, self._request = driver, request
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
        return self._driver.must_end


def make_trial_name(trial: Trial) -> str:
    """Make Tune's name of a trial: its number in the study and the attempt's id."""
    return f"trial-{trial.config.get('number', 0):04d}-{trial.trial_id[-5:]}"


def _get_payload(result: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(result.get(PAYLOAD, "{}"))
    return message
