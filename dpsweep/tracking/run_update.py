"""Events of a batch, grouped by run so that few calls deliver them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

from mlflow.entities import Metric, Param, RunTag

from dpsweep.tracking.spool import Event

RUNNING = "RUNNING"
NOTE = "mlflow.note.content"
_LONGEST_PARAM = 6000
_LONGEST_TAG = 8000
_NOT_METRICS = ("epoch", "step")
_MOST_METRICS, _MOST_PARAMS, _MOST_TAGS = 800, 100, 100
"""MLflow takes 100 params, 100 tags and 1000 of all kinds in a call."""


@dataclass
class RunUpdate:
    """Everything to be delivered to one run."""

    params: dict[str, str] = field(default_factory=dict)  # config key -> value
    tags: dict[str, str] = field(default_factory=dict)  # by name; the last word counts
    metrics: list[Metric] = field(default_factory=list)  # in the order they were reported
    artifacts: list[str] = field(default_factory=list)  # paths of files and folders
    status: str | None = None  # the status to leave it in; None if nothing was said of it
    name: str | None = None  # what a new run is called; None for the name it has otherwise
    view: str | None = None  # how the UI's table of runs is to look; None if nothing was said of it

    def add(self, event: Event) -> None:
        """Take one event in; see tracking/tracker.py for the kinds."""
        match event["kind"]:
            case "row":
                self.metrics += _list_metrics(event["row"], event.get("time"))
            case "sweep" | "trial":
                self.params |= {k: str(v)[:_LONGEST_PARAM] for k, v in event["params"].items()}
                said = {**event["tags"], NOTE: event["note"]}
                self.tags |= {k: v[:_LONGEST_TAG] for k, v in said.items()}
                self.name = event.get("name", self.name)
                self.view = event.get("view", self.view)
                self.status = RUNNING
            case "artifact":
                self.artifacts.append(event["path"])
            case "end":
                self.metrics += _list_metrics(event.get("metrics", {}), event.get("time"))
                self.tags |= {k: v[:_LONGEST_TAG] for k, v in event["tags"].items()}
                self.status = event["status"]

    def tag_batches(self) -> Iterator[list[RunTag]]:
        """Tags for each call to log_batch, within the server's limit."""
        tags = [RunTag(k, v) for k, v in self.tags.items()]
        return _chunk(tags, _MOST_TAGS)

    def batches(self) -> Iterator[tuple[list[Param], list[Metric]]]:
        """Params and metrics for each call to log_batch, within the server's limits."""
        params = [Param(k, v) for k, v in self.params.items()]
        return zip_longest(
            _chunk(params, _MOST_PARAMS), _chunk(self.metrics, _MOST_METRICS), fillvalue=[]
        )


T = TypeVar("T")


def _chunk(items: list[T], most: int) -> Iterator[list[T]]:
    return (items[i : i + most] for i in range(0, len(items), most))


def group_by_run(events: list[Event]) -> dict[int | None, RunUpdate]:
    """Group a batch of events by trial number; None, the parent run's, comes first.

    It carries the privacy statement, which is to be there before any trial that it covers.
    """
    found: dict[int | None, RunUpdate] = {}
    for event in events:
        found.setdefault(event.get("number"), RunUpdate()).add(event)
    return dict(sorted(found.items(), key=lambda item: item[0] is not None))


def _list_metrics(row: dict[str, Any], time: float | None) -> list[Metric]:
    """Finite figures of a row; MLflow keeps no infinity, and the note says what one means.

    Args:
        row: By name; with the optimizer's `step`, if it is a trial's.
        time: Unix time of the row. A spool of an earlier version has none.
    """
    step, epoch = int(row.get("step", 0)), int(row.get("epoch", 0))
    timestamp = epoch if time is None else round(1000 * time)
    return [
        Metric(name, float(value), timestamp=timestamp, step=step)
        for name, value in row.items()
        if name not in _NOT_METRICS and math.isfinite(value)
    ]
