"""What a batch of events says of each run, put together so that few calls deliver it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

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
class Parcel:
    """Everything to be delivered to one run.

    Attributes:
        params: Config key -> value.
        tags: By name; the last word counts.
        metrics: In the order they were reported.
        artifacts: Paths of files and folders.
        name: What a new run is called; None for the name it has otherwise.
        view: How the UI's table of runs is to look; None if nothing was said of it.
        status: The status to leave it in; None if nothing was said of it.
    """

    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)
    status: str | None = None
    name: str | None = None
    view: str | None = None

    def add(self, event: Event) -> None:
        """Takes one event in; see track/tracker.py for the kinds."""
        match event["kind"]:
            case "row":
                self.metrics += _metrics(event["row"])
            case "sweep" | "trial":
                self.params |= {k: str(v)[:_LONGEST_PARAM] for k, v in event["params"].items()}
                self.tags |= {**event["tags"], NOTE: event["note"][:_LONGEST_TAG]}
                self.name = event.get("name", self.name)
                self.view = event.get("view", self.view)
                self.status = RUNNING
            case "artifact":
                self.artifacts.append(event["path"])
            case "end":
                self.metrics += _metrics({"epoch": 0, **event.get("metrics", {})})
                self.tags |= {k: v[:_LONGEST_TAG] for k, v in event["tags"].items()}
                self.status = event["status"]

    def batches(self) -> Iterator[dict[str, list[Any]]]:
        """Arguments of the calls to log_batch, within the server's limits."""
        params = iter([Param(k, v) for k, v in self.params.items()])
        tags = iter([RunTag(k, v) for k, v in self.tags.items()])
        metrics = iter(self.metrics)
        while True:
            batch: dict[str, list[Any]] = {
                "params": list(islice(params, _MOST_PARAMS)),
                "tags": list(islice(tags, _MOST_TAGS)),
                "metrics": list(islice(metrics, _MOST_METRICS)),
            }
            if not any(batch.values()):
                return
            yield batch


def parcels(events: list[Event]) -> dict[int | None, Parcel]:
    """What a batch says, by trial number; None is the parent run's."""
    found: dict[int | None, Parcel] = {}
    for event in events:
        found.setdefault(event.get("number"), Parcel()).add(event)
    return found


def _metrics(row: dict[str, Any]) -> list[Metric]:
    """Finite figures of a row; MLflow keeps no infinity, and the note says what one means."""
    epoch = int(row["epoch"])
    return [
        Metric(name, float(value), timestamp=epoch, step=epoch)
        for name, value in row.items()
        if name not in _NOT_METRICS and math.isfinite(value)
    ]
