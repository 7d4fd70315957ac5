"""Gauges of a sweep for Prometheus, through Ray's metrics: what a dashboard shows while it runs.

Ray's agent on the driver's node serves them at its metrics port, with `ray_` before each name. All
figures are those that the driver's watchers are told and the study holds. Of a private selection
watchers are told nothing, so it has no gauges.
"""

from collections import Counter
from pathlib import Path

from ray.util.metrics import Gauge

from dpsweep.core.types import Row
from dpsweep.search.trial_record import Record
from dpsweep.store.study import Study
from dpsweep.tracking.spool import read_backlog

_STATES = ("running", "complete", "pruned", "failed")

GAUGES = {
    "dpsweep_trials": "Trials and repeats by state.",
    "dpsweep_best_value": "Objective of the best complete trial.",
    "dpsweep_trial_epsilon_max": "Largest epsilon that one trial has spent; not the search's.",
    "dpsweep_spool_length": "Results that the tracking server has not taken yet.",
}
"""Name of each gauge -> its description."""


class GaugeWatcher:
    """Sets the gauges of one sweep as its trials begin, report and end.

    Args:
        folder: The sweep's folder, which holds what the tracking server has not taken.
    """

    def __init__(self, study: Study, folder: Path) -> None:
        self._study, self._folder = study, folder
        self._epsilon = 0.0
        self._best: float | None = None
        self._gauges = {
            name: Gauge(name, words, ("sweep", "state") if name == "dpsweep_trials" else ("sweep",))
            for name, words in GAUGES.items()
        }
        self._states: dict[int, str] = {}
        for record in study.records():
            self._note_epsilon(record.row)
            self._states[record.number] = record.state
        self._count()
        self._set_best()

    def on_trial_start(self, record: Record) -> None:
        """Count a trial that was given to a worker."""
        self._states[record.number] = record.state
        self._count()

    def on_trial_report(self, record: Record, row: Row) -> None:
        """Take what a trial has spent."""
        self._note_epsilon(row)

    def on_trial_end(self, record: Record) -> None:
        """Count a trial that is complete, pruned or failed."""
        self._states[record.number] = record.state
        self._count()
        if record.state == "complete" and self._may_be_best(record):
            self._set_best()
            self._best = record.value if record.confirms is None else None

    def _may_be_best(self, record: Record) -> bool:
        """True unless a better trial ended before: ranking all trials at each end is slow."""
        if self._best is None or record.value is None or record.confirms is not None:
            return True
        sign = self._study.sweep.config.objective.sign
        return sign * record.value < sign * self._best

    def _note_epsilon(self, row: Row | None) -> None:
        if row is not None:
            self._epsilon = max(self._epsilon, row["privacy/epsilon_spent"])
            self._set("dpsweep_trial_epsilon_max", self._epsilon)

    def _count(self) -> None:
        """Set the numbers of trials and of waiting results, without reading the study."""
        count = Counter(self._states.values())
        for state in _STATES:
            self._set("dpsweep_trials", count[state], state=state)
        self._set("dpsweep_spool_length", read_backlog(self._folder).waiting)

    def _set_best(self) -> None:
        best = self._study.best()
        if best and best[0].value is not None:
            self._set("dpsweep_best_value", best[0].value)

    def _set(self, name: str, value: float, **tags: str) -> None:
        self._gauges[name].set(value, {"sweep": self._study.sweep.name, **tags})
