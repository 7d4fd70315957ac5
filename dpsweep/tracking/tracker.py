"""Tracking of one sweep. Every call appends to the spool and returns at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpsweep.tracking.spool import Deliver, DeliveryThread, Spool

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""MLflow's words for how a run ended."""


@dataclass(frozen=True)
class Facts:
    """Facts that are written once on a run."""

    params: dict[str, Any]  # config key -> value
    tags: dict[str, str]  # whatever else is worth filtering by
    note: str  # the run's description in Markdown: its privacy statement above all
    # what the run is called; None for the sweep's name, or the trial's number
    name: str | None = None
    # how the UI's table of runs is to look (compat.format_view); of the parent run only
    view: str | None = None


class Tracker:
    """Records one sweep: a parent run, and a child run for each trial."""

    def __init__(self, folder: Path, deliver: Deliver) -> None:
        self.spool = Spool(folder)
        self._delivery = DeliveryThread(self.spool, deliver)
        self._delivery.start()

    def sweep(self, facts: Facts) -> None:
        """The parent run is there, with these facts; said again, they replace the old ones."""
        more = {} if facts.view is None else {"view": facts.view}
        self._add("sweep", params=facts.params, tags=facts.tags, note=facts.note, **more)

    def trial(self, number: int, facts: Facts) -> None:
        """A child run is there and running."""
        more = {} if facts.name is None else {"name": facts.name}
        said = {"params": facts.params, "tags": facts.tags, "note": facts.note, **more}
        self._add("trial", number=number, **said)

    def row(self, number: int, row: dict[str, float], at: float | None = None) -> None:
        """A trial reported, at a Unix time that is the same however often it is told."""
        more = {} if at is None else {"time": at}
        self._add("row", number=number, row=row, **more)

    def trial_end(self, number: int, status: Status, tags: dict[str, str]) -> None:
        """A trial is through."""
        self._add("end", number=number, status=status, tags=tags)

    def sweep_end(self, status: Status) -> None:
        """The sweep is through."""
        self._add("end", number=None, status=status, tags={})

    def artifact(self, path: Path, number: int | None = None) -> None:
        """A released file, or a folder of them, for the parent run or for a trial's."""
        self._add("artifact", number=number, path=str(path.absolute()))

    def flush(self, timeout: float) -> bool:
        """Wait until all is delivered, or delivery fails, or time is up. True if all is."""
        return self._delivery.flush(timeout)

    def close(self, timeout: float = 60.0) -> bool:
        """Wait for delivery. False if something is left for the next time."""
        return self._delivery.close(timeout)

    @property
    def trouble(self) -> str | None:
        """Reason of the last failed delivery, if it failed."""
        return self._delivery.trouble

    @property
    def refused(self) -> str | None:
        """Description of what the server refused for good; None if it took everything."""
        number = self.spool.count_refused()
        return (
            f"the tracking server refused {number} entries for good; they are in "
            f"{self.spool.refused_file}, each with its reason"
            if number
            else None
        )

    def _add(self, kind: str, **rest: Any) -> None:
        self.spool.append({"kind": kind, **rest})
