"""Tells the tracker what the driver sees: which facts of a trial become params and tags."""

import subprocess
import sys
from functools import cache
from importlib.metadata import version
from typing import Any

from dpsweep.compat import format_view
from dpsweep.config.keys import (
    BATCH_SIZE,
    CLIP_NORM,
    EPOCHS,
    EPSILON,
    METHOD_NAME,
    SCOPE,
    TOTAL_STEP,
    flatten,
)
from dpsweep.config.space.conditions import STEP_SIZES, get_scalar
from dpsweep.config.space.leaves import list_leaves
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import dump_trial
from dpsweep.core import __version__
from dpsweep.core.disk import write_atomically
from dpsweep.core.types import Row
from dpsweep.privacy.statement import NO_EPSILON, format_plans
from dpsweep.search.charge import describe_trial_privacy
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import SweepFolder
from dpsweep.store.statement import describe_search_privacy
from dpsweep.store.study import Study
from dpsweep.tracking.tracker import Facts, Status, Tracker
from dpsweep.training.trial_dir import TrialDir

PACKAGES = ("torch", "ray", "optuna", "mlflow", "dp-accounting", "numpy")
_MOST_COLUMNS = 9
_LONGEST_CONFIG = 3000
"""Characters; MLflow keeps 8000 in a tag."""

_DELIVERY_SECONDS = 10.0
"""Longest wait of a trial for a raised privacy statement to reach a slow tracking server."""

CHECKS = "release-checks.md"
"""File of the release checks: in the sweep's folder, and beside the statement."""

CONFIG = "trial.yaml"
"""File of a trial's whole config, in its directory and among the artifacts of its run."""

_ALWAYS = (METHOD_NAME, *STEP_SIZES, BATCH_SIZE, EPOCHS, CLIP_NORM, EPSILON)
"""Keys that every run has as params, searched or not."""

STATEMENT, GROWN = "dpsweep.privacy", "dpsweep.grown"
"""Tags of the parent run: the search's privacy statement, and how its number of runs was raised."""

_AS_A_PART = "What the search as a whole has spent is said in the parent run."
_STATUS: dict[str, Status] = {"complete": "FINISHED", "pruned": "FINISHED", "failed": "FAILED"}
"""MLflow draws KILLED like FAILED, and a pruned trial has not failed: see the tag dpsweep.state."""


class TrackingWatcher:
    """Writes each event of a trial to the tracker's spool, the privacy statement ahead of it."""

    def __init__(self, tracker: Tracker, study: Study, folder: SweepFolder) -> None:
        self._tracker, self._study, self._folder = tracker, study, folder
        self._num_stated, self._void_stated = 0, False

    def reconcile(self) -> None:
        """Tell again all that the study knows: what was lost on the way is made good."""
        self.sweep_started()
        for record in self._study.records():
            self.on_trial_start(record)
            for row in TrialDir(self._folder.trial_dir(record.number)).rows():
                if record.row and row["epoch"] <= record.row["epoch"]:
                    self.on_trial_report(record, row)
            if record.state != "running":
                self.on_trial_end(record)

    def sweep_started(self) -> None:
        """Describe the parent run, with the privacy statement of all runs that are planned.

        The statement of an earlier plan says too little as soon as a trial more is dispatched. So
        the new one is in the sweep's folder and in the spool, ahead of any later event, when this
        returns. If runs had begun before, some seconds are spent on delivering it as well: a
        driver may be killed at any time, and nobody empties its spool. A server that is away is
        not waited for.
        """
        study, sweep = self._study, self._study.sweep
        config, trial = sweep.config, sweep.written
        params = {
            "objective": config.objective.metric,
            "sampler": config.sampler.name,
            "pruner": config.pruner.name,
            "budget.trials": config.budget.trials,
            "accounting": config.accounting,
            "data.name": trial.data.name,
            "model.name": trial.model.name,
            EPSILON: ", ".join(f"{e or 0:g}" for e in sweep.epsilons if e) or None,
            SCOPE: trial.privacy.scope,
        }
        self._num_stated, self._void_stated = study.num_planned, study.is_void
        words = describe_search_privacy(study, planned=True)
        write_atomically(self._folder.path / "privacy.md", f"{words}\n".encode())
        tags = collect_provenance() | _make_sweep_tags(sweep) | make_test_secret_tags(study)
        tags |= {"dpsweep.complete": "false", STATEMENT: words}
        if len(study.plans) > 1:
            tags[GROWN] = format_plans(study.plans)
        self._tracker.sweep(Facts(params, tags, f"**Privacy.** {words}", view=_make_view(sweep)))
        # The checks too, and not before: when a private selection began is told by nothing.
        for name in ("sweep.yaml", "privacy.md", CHECKS):
            self._tracker.artifact(self._folder.path / name)
        if any(record.dispatched for record in study.records()) and not study.is_finished():
            self._tracker.flush(_DELIVERY_SECONDS)

    def on_trial_start(self, record: Record) -> None:
        """The trial's run is there, with what was searched and its privacy statement."""
        if record.number >= self._num_stated or (record.void and not self._void_stated):
            self.sweep_started()
            self._num_stated = max(self._num_stated, record.number + 1)
        params = select_params(record)
        tags = collect_provenance() | _make_trial_tags(record)
        note = self._description(record)
        self._tracker.trial(record.number, Facts(params, tags, note, name=make_run_name(record)))

    def on_trial_report(self, record: Record, row: Row) -> None:
        """A row of metrics, at the time of the trial's work.

        The study says when the trial was asked for, so that a row that is told again after a crash
        has the same time, and MLflow knows it.
        """
        self._tracker.row(
            record.number, row, None if record.asked is None else record.asked + row["seconds"]
        )

    def on_trial_end(self, record: Record) -> None:
        """Record how the trial ended, and its privacy statement."""
        tags = {
            "dpsweep.state": record.state,
            "mlflow.note.content": self._description(record),
            **({"privacy": "void"} if record.void else {}),
            **({"dpsweep.reason": record.reason} if record.reason else {}),
        }
        config = self._folder.trial_dir(record.number) / CONFIG
        if config.parent.exists():  # of a private selection's winner it may be gone
            write_atomically(config, dump_trial(record.config).encode())
            self._tracker.artifact(config, record.number)
        self._tracker.trial_end(record.number, _STATUS[record.state], tags)

    def _description(self, record: Record) -> str:
        """A trial's page in Markdown: its privacy, what it found, and how to repeat it."""
        metric = self._study.sweep.config.objective.metric
        found = f"**Result.** {metric} {record.value:.4f}" if record.value is not None else ""
        if found and record.row:
            found += f" at epoch {record.row['epoch']:g}"
        if record.final:
            found += f"\n\nThe final run, at the config that exploring trial {record.confirms} had."
        elif record.confirms is not None:
            found += f"\n\nRepeats trial {record.confirms} with fresh noise."
        return (
            f"**Privacy.** This run by itself: {describe_trial_privacy(record)} {_AS_A_PART}\n\n"
            f"{found}\n\n"
            f"{describe_retraining(dump_trial(record.config))}"
        )


def select_params(record: Record) -> dict[str, Any]:
    """Select the keys of a trial's config that differ or are read most; all are in its `CONFIG`.

    MLflow's pages order params by name and fold none of them: among forty, those that were searched
    are not found.
    """
    flat = flatten(record.config.model_dump(mode="json"), empty=False)
    flat |= {key: get_scalar(record.config, key) for key in STEP_SIZES}
    searched = {k for k in flat if any(f"{k}.".startswith(f"{h}.") for h in record.hyperparams)}
    return {key: flat[key] for key in (*searched, *_ALWAYS) if flat.get(key) is not None}


def make_run_name(record: Record) -> str:
    """Make the name of a trial's run: its number, and the hyperparameters that differ most.

    `0007 fftkf lr 0.52 B 1000`; a repeat says of which trial, and where budgets differ, which.
    """
    config = record.config
    repeat = "" if record.confirms is None else f" repeats {record.confirms}"
    repeat = " final" if record.final else repeat
    budget = f" ε {config.privacy.epsilon:g}" if EPSILON in record.hyperparams else ""
    return (
        f"{record.number:04d}{repeat} {config.method.name} {config.step_size} "
        f"B {config.train.batch_size}{budget}"
    )


def make_test_secret_tags(study: Study) -> dict[str, str]:
    """Make the tag of a sweep that used a test seed; none for any other."""
    return {"privacy": "void", "dpsweep.epsilon": NO_EPSILON} if study.is_void else {}


def _make_sweep_tags(sweep: ResolvedSweep) -> dict[str, str]:
    """Make the tags by which the parent run is filtered; several values are listed."""
    trial = sweep.written
    return {
        "dpsweep.method": ", ".join(sorted(sweep.methods)),
        "dpsweep.data": trial.data.name,
        "dpsweep.model": trial.model.name,
        "dpsweep.epsilon": ", ".join(f"{e:g}" for e in sweep.epsilons if e) or "none",
    }


def _make_trial_tags(record: Record) -> dict[str, str]:
    config = record.config
    return {
        "dpsweep.method": config.method.name,
        "dpsweep.data": config.data.name,
        "dpsweep.model": config.model.name,
        "dpsweep.epsilon": NO_EPSILON if record.void else _format_epsilon(config.privacy.epsilon),
        "dpsweep.state": "running",
        **({} if record.confirms is None else {"dpsweep.confirms": str(record.confirms)}),
        **({"dpsweep.final": "true"} if record.final else {}),
    }


def _format_epsilon(epsilon: float | None) -> str:
    return f"{epsilon:g}" if epsilon else "none"


def _make_view(sweep: ResolvedSweep) -> str:
    """The objective, then method, learning rate and batch size, then what else is searched."""
    first = (METHOD_NAME, TOTAL_STEP, BATCH_SIZE)
    leaves = list_leaves(sweep.space)
    searched = [leaf.slot.key for leaf in leaves]
    always = [leaf.slot.key for leaf in leaves if leaf.branch is None]
    objective = sweep.config.objective
    return format_view(
        objective.metric,
        list(dict.fromkeys([*first, *searched]))[:_MOST_COLUMNS],
        list(dict.fromkeys([TOTAL_STEP, BATCH_SIZE, *always]))[:_MOST_COLUMNS],
        maximise=objective.direction == "maximize",
    )


def describe_retraining(config: str) -> str:
    """A config in Markdown, and how it is trained again; short enough for a tag."""
    if len(config) > _LONGEST_CONFIG:
        return "**Again.** The config is too long for this page; `dpsweep export` writes it."
    return (
        f"**Again.** Save as `trial.yaml`; `dpsweep train trial.yaml` trains it with fresh noise."
        f"\n\n```yaml\n{config}```"
    )


@cache
def collect_provenance() -> dict[str, str]:
    """Versions of what took part, and the commit of the folder the sweep was launched in."""
    tags = {"dpsweep.version": __version__, "python": sys.version.split()[0]}
    tags.update({f"version.{name}": version(name) for name in PACKAGES})
    return {**tags, **_read_commit()}


def _read_commit() -> dict[str, str]:
    """The git commit, if the current folder is in a repository; a launch elsewhere has none."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=10
        )
    except OSError:
        return {}
    return {"mlflow.source.git.commit": found.stdout.strip()} if found.returncode == 0 else {}
