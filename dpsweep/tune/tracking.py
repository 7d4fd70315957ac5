"""Tells the tracker what the driver sees: which facts of a trial become params and tags."""

import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpsweep import __version__
from dpsweep.config.sweep import Sweep
from dpsweep.core.types import Row
from dpsweep.track.tracker import Facts, Status, Tracker
from dpsweep.train.room import Room
from dpsweep.tune.charge import statement
from dpsweep.tune.record import Record
from dpsweep.tune.state import SweepFolder
from dpsweep.tune.study import Study

PACKAGES = ("torch", "ray", "optuna", "mlflow", "dp-accounting", "numpy")
_AS_A_PART = "What the search as a whole has spent is said in the parent run."
_STATUS: dict[str, Status] = {"complete": "FINISHED", "pruned": "KILLED", "failed": "FAILED"}


class TrackingWatcher:
    """Writes each event of a trial to the tracker's spool."""

    def __init__(self, tracker: Tracker, sweep: Sweep) -> None:
        self._tracker, self._sweep = tracker, sweep

    def sweep_started(self) -> None:
        """Describes the parent run."""
        config, trial = self._sweep.config, self._sweep.written
        params = {
            "objective": config.objective.metric,
            "sampler": config.sampler.name,
            "stop": config.stop.name,
            "budget.trials": config.budget.trials,
            "accounting": config.accounting,
            "data.name": trial.data.name,
            "model.name": trial.model.name,
            "privacy.epsilon": ", ".join(f"{e or 0:g}" for e in self._sweep.epsilons if e) or None,
            "privacy.scope": trial.privacy.scope,
        }
        note = f"Sweep {config.name}: the privacy statement follows when trials have run."
        self._tracker.sweep(Facts(params, provenance(), note))

    def started(self, record: Record) -> None:
        """The trial's run is there, with its whole config."""
        note = "This trial is running; its privacy statement follows."
        self._tracker.trial(
            record.number,
            Facts(
                flat(record.config.model_dump(mode="json")), provenance() | _repeats(record), note
            ),
        )

    def reported(self, record: Record, row: Row) -> None:
        """A row of metrics."""
        self._tracker.row(record.number, row)

    def ended(self, record: Record) -> None:
        """How it ended, and what it promises."""
        tags = {
            "dpsweep.state": record.state,
            "mlflow.note.content": f"This run by itself: {statement(record)} {_AS_A_PART}",
            **({"privacy": "void"} if record.void else {}),
            **({"dpsweep.reason": record.reason} if record.reason else {}),
        }
        self._tracker.trial_end(record.number, _STATUS[record.state], tags)


def _repeats(record: Record) -> dict[str, str]:
    return {} if record.confirms is None else {"dpsweep.confirms": str(record.confirms)}


def reconcile(watcher: TrackingWatcher, study: Study, folder: SweepFolder) -> None:
    """Says everything again that the study knows: what was lost on the way is made good."""
    watcher.sweep_started()
    for record in study.records():
        watcher.started(record)
        for row in Room(folder.room(record.number)).rows():
            if record.row and row["epoch"] <= record.row["epoch"]:
                watcher.reported(record, row)
        if record.state != "running":
            watcher.ended(record)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys.

    >>> flat({"method": {"name": "disk", "kappa": 0.7}, "seed": 0})
    {'method.name': 'disk', 'method.kappa': 0.7, 'seed': 0}
    """
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out.update(flat(value, f"{prefix}{key}."))
        elif value is not None:
            out[f"{prefix}{key}"] = value
    return out


@cache
def provenance() -> dict[str, str]:
    """Versions of what took part, and the commit of the folder the sweep was launched in."""
    tags = {"dpsweep.version": __version__, "python": sys.version.split()[0]}
    tags.update({f"version.{name}": version(name) for name in PACKAGES})
    return {**tags, **_commit(Path.cwd())}


def _commit(folder: Path) -> dict[str, str]:
    """The git commit, if the folder is in a repository; a launch elsewhere has none."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except OSError:
        return {}
    return {"mlflow.source.git.commit": found.stdout.strip()} if found.returncode == 0 else {}
