"""Tells the tracker what the driver sees: which facts of a trial become params and tags."""

import subprocess
import sys
from functools import cache
from importlib.metadata import version
from typing import Any

from dpsweep import __version__
from dpsweep.config.space.leaves import leaves
from dpsweep.config.sweep import Sweep
from dpsweep.config.trial import config_yaml
from dpsweep.core.types import Row
from dpsweep.privacy.statement import NO_EPSILON
from dpsweep.search.charge import statement
from dpsweep.search.study_view import EPSILON_KEY
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import SweepFolder
from dpsweep.store.study import Study
from dpsweep.tracking.tracker import Facts, Status, Tracker
from dpsweep.tracking.ui_view import best_first
from dpsweep.training.trial_dir import Room

PACKAGES = ("torch", "ray", "optuna", "mlflow", "dp-accounting", "numpy")
_MOST_COLUMNS = 9
_LONGEST_CONFIG = 3000
"""Characters; MLflow keeps 8000 in a tag."""

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
            "pruner": config.pruner.name,
            "budget.trials": config.budget.trials,
            "accounting": config.accounting,
            "data.name": trial.data.name,
            "model.name": trial.model.name,
            "privacy.epsilon": ", ".join(f"{e or 0:g}" for e in self._sweep.epsilons if e) or None,
            "privacy.scope": trial.privacy.scope,
        }
        note = f"Sweep {config.name}: the privacy statement follows when trials have run."
        tags = provenance() | sweep_tags(self._sweep)
        self._tracker.sweep(Facts(params, tags, note, view=_view(self._sweep)))

    def started(self, record: Record) -> None:
        """The trial's run is there, with its whole config."""
        note = "This trial is running; its privacy statement follows."
        params = flat(record.config.model_dump(mode="json"))
        tags = provenance() | _trial_tags(record)
        self._tracker.trial(record.number, Facts(params, tags, note, name=run_name(record)))

    def reported(self, record: Record, row: Row) -> None:
        """A row of metrics."""
        self._tracker.row(record.number, row)

    def ended(self, record: Record) -> None:
        """How it ended, and what it promises."""
        tags = {
            "dpsweep.state": record.state,
            "mlflow.note.content": _description(record, self._sweep.config.objective.metric),
            **({"privacy": "void"} if record.void else {}),
            **({"dpsweep.reason": record.reason} if record.reason else {}),
        }
        self._tracker.trial_end(record.number, _STATUS[record.state], tags)


def run_name(record: Record) -> str:
    """What a trial's run is called: its number, and what tells it from others at a glance.

    `0007 fftkf lr 0.52 B 1000`; a repeat says of which trial, and where budgets differ, which.
    """
    config = record.config
    repeat = "" if record.confirms is None else f" repeats {record.confirms}"
    budget = f" ε {config.privacy.epsilon:g}" if EPSILON_KEY in record.knobs else ""
    return (
        f"{record.number:04d}{repeat} {config.method.name} lr {config.optimizer.lr:.3g} "
        f"B {config.train.batch_size}{budget}"
    )


def sweep_tags(sweep: Sweep) -> dict[str, str]:
    """What a sweep's run is filtered by, as its trials' are; several values are listed."""
    trial = sweep.written
    return {
        "dpsweep.method": ", ".join(sorted(sweep.methods)),
        "dpsweep.data": trial.data.name,
        "dpsweep.model": trial.model.name,
        "dpsweep.epsilon": ", ".join(f"{e:g}" for e in sweep.epsilons if e) or "none",
    }


def _trial_tags(record: Record) -> dict[str, str]:
    config = record.config
    return {
        "dpsweep.method": config.method.name,
        "dpsweep.data": config.data.name,
        "dpsweep.model": config.model.name,
        "dpsweep.epsilon": NO_EPSILON if record.void else _shown(config.privacy.epsilon),
        "dpsweep.state": "running",
        **({} if record.confirms is None else {"dpsweep.confirms": str(record.confirms)}),
    }


def _shown(epsilon: float | None) -> str:
    return f"{epsilon:g}" if epsilon else "none"


def _view(sweep: Sweep) -> str:
    """The objective, then method, learning rate and batch size, then what else is searched."""
    first = ("method.name", "optimizer.lr", "train.batch_size")
    searched = [leaf.slot.key for leaf in leaves(sweep.space)]
    objective = sweep.config.objective
    return best_first(
        objective.metric,
        list(dict.fromkeys([*first, *searched]))[:_MOST_COLUMNS],
        maximise=objective.direction == "maximize",
    )


def _description(record: Record, metric: str) -> str:
    """A trial's page in Markdown: what it promises, what it found, and how to repeat it."""
    found = f"**Result.** {metric} {record.value:.4f}" if record.value is not None else ""
    if found and record.row:
        found += f" at epoch {record.row['epoch']:g}"
    if record.confirms is not None:
        found += f"\n\nRepeats trial {record.confirms} with fresh noise."
    return (
        f"**Privacy.** This run by itself: {statement(record)} {_AS_A_PART}\n\n{found}\n\n"
        f"{again(config_yaml(record.config))}"
    )


def again(config: str) -> str:
    """A config in Markdown, and how it is trained again; short enough for a tag."""
    if len(config) > _LONGEST_CONFIG:
        return "**Again.** The config is too long for this page; `dpsweep export` writes it."
    return (
        f"**Again.** Save as `trial.yaml`; `dpsweep train trial.yaml` trains it with fresh noise."
        f"\n\n```yaml\n{config}```"
    )


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
    return {**tags, **_commit()}


def _commit() -> dict[str, str]:
    """The git commit, if the current folder is in a repository; a launch elsewhere has none."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except OSError:
        return {}
    return {"mlflow.source.git.commit": found.stdout.strip()} if found.returncode == 0 else {}
