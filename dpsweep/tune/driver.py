"""The driver's part in a sweep: what to run next, and what to make of what comes back.

It knows neither Ray nor MLflow. tune/adapters.py calls it with Tune's events; it tells the
study first, and then whoever watches. Watchers are told again after a crash.
"""

import logging
import time
from typing import Any, Protocol

from dpsweep.config.sweep import BudgetConfig
from dpsweep.core.errors import ConfigError
from dpsweep.core.types import Row
from dpsweep.train.budget import steps_and_rate
from dpsweep.train.room import Room
from dpsweep.tune.state import SweepFolder
from dpsweep.tune.study import Record, Study, TrialEnd
from dpsweep.tune.trial import Assignment

log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Someone who wants to know how the trials fare: the tracker, the display."""

    def started(self, record: Record) -> None:
        """A trial was given to a worker, for the first time or again."""

    def reported(self, record: Record, row: Row) -> None:
        """A trial reported `row`."""

    def ended(self, record: Record) -> None:
        """A trial is complete, pruned or failed."""


class Driver:
    """Asks, reports and tells for one sweep. Trials are known by the id Tune gives them."""

    def __init__(self, study: Study, folder: SweepFolder, watchers: list[Watcher]) -> None:
        self._study, self._folder, self._watchers = study, folder, watchers
        self._live: dict[str, int] = {}
        self._pruned: set[str] = set()
        self._to_adopt = study.running()
        self._start = time.monotonic()
        self.stopping = False

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune writes its arguments to disk for a restore that we never ask for."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Driver":
        """Itself, should Tune copy its arguments."""
        return self

    def num_left(self) -> int:
        """Trials still to be run, interrupted ones included."""
        return len(self._to_adopt) + max(0, self._budget.trials - self._study.num_asked())

    def next(self, trial_id: str) -> Assignment | None:
        """The trial to run as `trial_id`; None if there is none left."""
        record = self._next_record()
        if record is None:
            return None
        room = Room(self._folder.room(record.number))
        if not record.handed_out:
            room.make_secret()
            record = self._study.hand_out(record.number, void=room.is_void)
        self._live[trial_id] = record.number
        for watcher in self._watchers:
            watcher.started(record)
        return {
            "number": record.number,
            "config": record.config.model_dump(mode="json"),
            "room": str(room.path),
        }

    def result(self, trial_id: str, payload: dict[str, Any]) -> bool:
        """Takes one message of a worker. True if the trial is to end now."""
        number = self._live.get(trial_id)
        row = payload.get("row")
        if number is None or row is None or not self._study.report(number, row):
            return False
        record = self._study.record(number)
        for watcher in self._watchers:
            watcher.reported(record, row)
        steps, _ = steps_and_rate(record.config)
        if row["step"] < steps and self._study.should_prune(number):
            self._pruned.add(trial_id)
            return True
        return False

    def ended(self, trial_id: str, payload: dict[str, Any] | None) -> None:
        """The worker is through with a trial, or (payload None) died too often."""
        number = self._live.pop(trial_id, None)
        if number is None:
            return
        room = Room(self._folder.room(number))
        end, reason = self._verdict(trial_id, payload)
        if end is None:
            return  # cut short by us: it stays running in the study, and resume goes on with it
        record = self._study.tell(number, end, reason=reason)
        room.forget()
        for watcher in self._watchers:
            watcher.ended(record)

    def _verdict(
        self, trial_id: str, payload: dict[str, Any] | None
    ) -> tuple[TrialEnd | None, str | None]:
        """How a trial ended, and why if it failed; None if it did not end."""
        if trial_id in self._pruned:
            return "pruned", None
        if payload is None:
            return "failed", "its worker process died again and again"
        if "end" in payload:
            return payload["end"], payload.get("reason")
        return (None, None) if self.stopping else ("failed", "it ended without a result")

    def _next_record(self) -> Record | None:
        if self._to_adopt:
            return self._study.adopt(self._to_adopt.pop(0))
        while not self._is_spent():
            try:
                return self._study.ask()
            except ConfigError as e:
                log.warning("%s", e)
        return None

    def _is_spent(self) -> bool:
        hours = (time.monotonic() - self._start) / 3600
        late = self._budget.hours is not None and hours >= self._budget.hours
        return late or self.stopping or self._study.num_asked() >= self._budget.trials

    @property
    def _budget(self) -> BudgetConfig:
        return self._study.sweep.config.budget
