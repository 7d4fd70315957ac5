"""A published table run again: each cell is a small search of its own, and its best is repeated.

A cell's search is an ordinary sweep: it is written to a file that `dpsweep launch` takes, and lives
in the state folder by the cell's name. So a table that was interrupted goes on where it stopped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from pydantic import Field

from dpsweep.config.keys import BATCH_SIZE, EPOCHS, EPSILON, EVALUATE_EVERY, path_of
from dpsweep.config.source import KeyPath, Source, Tree, parse_yaml, validate_source, with_value
from dpsweep.core.errors import ConfigError, unknown_name_error
from dpsweep.core.strict import Strict
from dpsweep.privacy.statement import format_delta
from dpsweep.results.groups import groups_of
from dpsweep.results.published import Cell, Table
from dpsweep.results.rich_table import markdown_table
from dpsweep.store.study import Study

LEAST_SEEDS = 2
_STARTUP_TRIALS = 4
"""Trials of a cell's search before it learns; not to depend on how many there are to be, as trials
can be added."""

HEADINGS = (
    *("row", "column", "method", "ε", "δ", "print", "ours", "±", "runs", "difference"),
    *("trials", "seconds", "what differs"),
)
"""Of the columns of `line`."""


class Budget(Strict):
    """Number of trials, repeats and epochs of each cell."""

    trials: int = Field(default=8, gt=0)
    """Trials of the search."""

    hours: float | None = Field(default=None, gt=0)
    """After so many hours no new trial starts."""

    epochs: float | None = Field(default=None, gt=0)
    """Length of a trial, in place of print's."""

    batch_size: int | None = Field(default=None, gt=0)
    """Of all trials, in place of a search over it."""

    @classmethod
    def of(cls, text: str) -> "Budget":
        """From what is typed, such as trials=8,epochs=5.

        Raises:
            ConfigError: Naming what is wrong with it.
        """
        tree: Tree = {}
        for part in filter(None, text.split(",")):
            key, equals, value = part.partition("=")
            if key not in cls.model_fields:
                raise unknown_name_error("key", key, cls.model_fields, where="--budget")
            if not equals:
                raise ConfigError(f"--budget {text}: expected KEY=VALUE, such as trials=8,epochs=5")
            tree[key] = parse_yaml(f"value: {value}", "--budget").tree["value"]
        found: Budget = validate_source(cls, Source("--budget", tree, {}))
        return found


def epsilons_of(given: Sequence[str], whole: Table, name: str) -> dict[str, float]:
    """Row -> budget, from what is typed: 4 for all rows, or smaller=1 for one.

    Raises:
        ConfigError: If it is no number, or of no row.
    """
    found: dict[str, float] = {}
    for text in given:
        row, _, number = text.rpartition("=")
        if row and row not in whole.rows:
            raise unknown_name_error("row", row, whole.rows, where=f"{name}: --epsilon")
        try:
            epsilon = float(number)
        except ValueError:
            epsilon = math.nan
        if not 0 < epsilon < math.inf:
            raise ConfigError(
                f"--epsilon {text}: expected a number above 0, such as 4, or ROW=NUMBER"
            )
        found.update(dict.fromkeys([row] if row else whole.rows, epsilon))
    return found


@dataclass(frozen=True)
class Job:
    """One cell and what is to be run for it."""

    cell: Cell
    name: str  # of its sweep
    epsilon: float | None  # its budget; None if it is not known
    obstacle: str  # why it cannot be run; empty if it can


def job_of(cell: Cell, epsilons: Mapping[str, float]) -> Job:
    """Make the job of a cell: its sweep, its epsilon and its seeds.

    Raises:
        ConfigError: If a budget is given and the paper has one.
    """
    given = epsilons.get(cell.row)
    if given is not None and cell.epsilon is not None:
        raise ConfigError(
            f"--epsilon {given:g}: {cell.table} has its own in the paper ({cell.epsilon:g} in row "
            f"{cell.row}). Leave the option out, or launch a sweep of your own"
        )
    epsilon, obstacle = cell.epsilon or given, cell.missing
    if epsilon is None and not obstacle:
        obstacle = f"its epsilon is lost in the text we have; give it with --epsilon {cell.row}=4"
    name = cell.name if given is None else f"{cell.name}.eps{given:g}"
    return Job(cell, name, epsilon, obstacle)


def spec_of(job: Job, budget: Budget, seeds: int) -> Tree:
    """The sweep file of a cell, as a tree."""
    base, search = job.cell.tree, dict(job.cell.search)
    base = with_value(base, path_of(EPSILON), job.epsilon)
    fixed: dict[KeyPath, Any] = {
        path_of(EPOCHS): budget.epochs,
        path_of(BATCH_SIZE): budget.batch_size,
    }
    for path, value in fixed.items():
        if value is not None:
            base = with_value(base, path, value)
            search.pop(".".join(map(str, path)), None)
    sizes = (k for k in ("lr", "total_step") if k in base["optimizer"])
    rate = {f"optimizer.{k}": base["optimizer"][k] for k in sizes}
    epochs = base["train"]["epochs"]
    every = min(base["train"]["evaluate_every"], max(1, math.ceil(epochs)))
    limits = {"trials": budget.trials} | ({"hours": budget.hours} if budget.hours else {})
    return {
        "name": job.name,
        "base": with_value(base, path_of(EVALUATE_EVERY), every),
        "search": search,
        "start": [rate] if rate.keys() <= search.keys() else [],
        "objective": {"metric": job.cell.objective},
        "sampler": {"name": "tpe", "startup_trials": _STARTUP_TRIALS},
        "budget": limits,
        "confirm": {"top": 1, "seeds": seeds},
    }


@dataclass(frozen=True)
class Result:
    """Result of a cell."""

    cell: Cell
    epsilon: float | None = None  # the budget of each trial
    delta: float | None = None  # failure probability of each trial
    values: tuple[float, ...] = ()  # figure of each repeat of its best config, in %
    best: float | None = None  # figure of that config when it was chosen, in %
    trials: int = 0  # trials of the search
    seconds: float = 0.0  # time spent training, over all trials and repeats
    differs: tuple[str, ...] = ()  # what its best config has otherwise than print
    remark: str = ""  # why there is nothing, or what is to be known of it

    @property
    def mean(self) -> float | None:
        """Of the repeats, in %; None without any."""
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Their standard deviation, in %; None for fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None


def result_of(job: Job, study: Study) -> Result:
    """Read the result of a cell's sweep so far."""
    if not study.records():
        return Result(job.cell, job.epsilon, remark="no trial yet")
    (group,) = groups_of(study, "")
    config = group.best.config.model_dump(mode="json") if group.best else {}
    remark = "; ".join([*([] if group.best else ["no trial was completed"]), *group.remarks])
    return Result(
        cell=job.cell,
        epsilon=job.epsilon,
        delta=group.delta,
        values=tuple(job.cell.percent * value for value in group.values),
        best=job.cell.percent * (group.best.value or 0.0) if group.best else None,
        trials=group.trials or 0,
        seconds=sum(record.seconds for record in study.records()),
        differs=tuple(_differs(config, job.cell.settings)) if config else (),
        remark=remark,
    )


def markdown(name: str, whole: Table, results: Sequence[Result]) -> str:
    """The table, and what is to be known of it."""
    lines = [f"# {name}", "", f"{whole.source}.", ""]
    lines += markdown_table(HEADINGS, map(line, results))
    lines += [
        "",
        "Accuracies, or the metric of the column, in %. print: as the paper has it; ours: mean of "
        "fresh runs of the best config of a small search, ± their standard deviation; difference: "
        "ours less print, in points. Each run keeps (ε, δ) by itself; what a cell's search has "
        "spent together stands in its sweep (`dpsweep best SWEEP`). Cells on the same data add up: "
        "no figure here covers several of them.",
        "",
        *(f"- {note}" for note in whole.notes),
    ]
    return "\n".join(lines) + "\n"


def line(result: Result) -> list[str]:
    """One line of the table."""
    cell, mean = result.cell, result.mean
    beside = "".join(f" ({what} {figure:g})" for what, figure in cell.beside.items())
    notes = [*result.differs, *filter(None, [result.remark])]
    return [
        cell.row,
        cell.column,
        cell.method,
        "–" if result.epsilon is None else f"{result.epsilon:g}",
        "–" if result.delta is None else format_delta(result.delta),
        f"{cell.published:.2f}{beside}",
        _figure(mean),
        _figure(result.spread),
        str(len(result.values)) if result.values else "–",
        "–" if mean is None else f"{mean - cell.published:+.2f}",
        str(result.trials) if result.trials else "–",
        f"{result.seconds:.0f}" if result.seconds else "–",
        "; ".join(notes) or "–",
    ]


def row(result: Result) -> dict[str, Any]:
    """The same as plain data."""
    cell = result.cell
    return {
        "table": cell.table,
        "row": cell.row,
        "column": cell.column,
        "method": cell.method,
        "epsilon": result.epsilon,
        "delta": result.delta,
        "published": cell.published,
        "beside": cell.beside,
        "mean": result.mean,
        "spread": result.spread,
        "values": list(result.values),
        "search_best": result.best,
        "trials": result.trials,
        "seconds": result.seconds,
        "differs": list(result.differs),
        "remark": result.remark,
    }


def _differs(config: Tree, settings: Mapping[str, Any]) -> list[str]:
    """List the settings in which a config differs from the published ones."""
    found = []
    for key, published in settings.items():
        ours: Any = config
        for part in key.split("."):
            ours = ours.get(part) if isinstance(ours, dict) else None
        if ours != published:
            shown = f"{ours:g}" if isinstance(ours, float) else str(ours)
            found.append(f"{key.rpartition('.')[2]} {shown} (published: {published})")
    return found


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
