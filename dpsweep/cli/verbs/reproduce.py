"""The verb that runs a published table again: reproduce."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dpsweep.app import orchestrator
from dpsweep.app.reproduce import (
    HEADINGS,
    LEAST_SEEDS,
    Budget,
    Job,
    Result,
    epsilons_of,
    job_of,
    line,
    markdown,
    result_of,
    row,
    spec_of,
)
from dpsweep.cli.say import STOPPED, console, warn
from dpsweep.cluster.connect import cluster
from dpsweep.cluster.nodes import check_nodes
from dpsweep.config.source import dump_yaml
from dpsweep.config.sweep import ResolvedSweep, load_sweep
from dpsweep.core.errors import ConfigError, DpSweepError
from dpsweep.execution.changes import check_changes
from dpsweep.execution.preflight import make_plan
from dpsweep.execution.resources import count_concurrent_trials, get_local_resources
from dpsweep.results.published import cells, table
from dpsweep.results.rich_table import plain_table
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import open_study
from dpsweep.training.check import check_sweep

_INCOMPLETE = 1


@dataclass(frozen=True)
class ReproduceOptions:
    """Cells of a table to run, and how to run them."""

    table: str
    rows: list[str]  # rows; all if empty, as for columns and methods
    columns: list[str]
    methods: list[str]  # methods, as print names them
    budget: str  # as typed
    seeds: int  # repeats of the best config of each cell
    epsilons: list[str]  # as typed
    settings: list[str]  # KEY=VALUE for every cell's sweep
    state: str | None  # state folder
    address: str | None  # of a Ray cluster; None for an embedded one
    tracking_uri: str | None  # of an MLflow server; None for a file in the state folder
    out: Path | None  # folder for the table, the sweep files and the best configs
    accept: bool  # whether harmless changes to a sweep that was launched are taken over
    fetch: bool  # whether missing data are downloaded
    quiet: bool  # whether trials go by in silence

    @property
    def folder(self) -> Path:
        """Folder of the table's files."""
        return self.out or Path("reproduction") / self.table

    def jobs(self) -> list[Job]:
        """The cells to run."""
        chosen = cells(self.table, self.rows, self.columns, self.methods)
        if not chosen:
            raise ConfigError(f"{self.table}: no cell has this row, column and method together")
        epsilons = epsilons_of(self.epsilons, table(self.table), self.table)
        return [job_of(cell, epsilons) for cell in chosen]

    def shown(self, jobs: list[Job]) -> list[Job]:
        """These cells and all others that were begun before, in the order of print."""
        asked, begun, found = (
            {job.name for job in jobs},
            StateFolder.at(self.state).names(),
            list[Job](),
        )
        for cell in cells(self.table):
            found += [job for job in jobs if job.cell == cell]
            head = f"{cell.name}.eps"
            given = [{cell.row: float(n.removeprefix(head))} for n in begun if n.startswith(head)]
            older = [job_of(cell, epsilons) for epsilons in ([{}] if cell.epsilon else given)]
            found += [job for job in older if job.name in begun and job.name not in asked]
        return found


def split_names(names: str) -> list[str]:
    """Split a list that is typed with commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def run(options: ReproduceOptions) -> None:
    """Run the cells in turn, and write the table, with the cells that earlier calls have run.

    Exit code 1 if a cell of this call has no figure.
    """
    jobs, budget = options.jobs(), _budget(options)
    skipped, stopped = dict[str, Result](), False
    with contextlib.ExitStack() as stack:
        start = cache(lambda: stack.enter_context(cluster(options.address)))
        for job in jobs:
            try:
                sweep = _ready(job, options, budget)
            except _Obstacle as e:
                warn([f"{job.name}: skipped: {e}"])
                skipped[job.name] = Result(job.cell, job.epsilon, remark=f"skipped: {e}")
                continue
            stopped = not _run(sweep, options, start)
            if stopped:
                break
    results = {job.name: _result(job, options) for job in options.shown(jobs)}
    results |= {name: one for name, one in skipped.items() if not results[name].values}
    _write(options, list(results.values()))
    _print(options, list(results.values()))
    if stopped:
        console().print("Stopped. The same command goes on with it.")
        sys.exit(STOPPED)
    if any(not results[job.name].values for job in jobs):
        sys.exit(_INCOMPLETE)


def plan(options: ReproduceOptions) -> None:
    """Print what each cell would take, from a probe of a few steps of some of its trials."""
    jobs, budget, out = options.jobs(), _budget(options), console()
    state = StateFolder.at(options.state)
    columns = ("cell", "trials", "repeats", "minutes", "left to do")
    title = f"{options.table}: {table(options.table).source}"
    shown_ = plain_table(title, columns, words=("cell", "left to do"))
    total, skipped = 0.0, False
    for job in jobs:
        try:
            sweep = _ready(job, options, budget)
        except _Obstacle as e:
            skipped = True
            shown_.add_row(job.name, "–", "–", "–", f"skipped: {e}")
            continue
        resources = sweep.config.resources
        made = make_plan(
            sweep, count_concurrent_trials(resources, [get_local_resources(resources)])
        )
        launched = state.sweep(sweep.name).exists
        finished = launched and open_study(sweep.name, state).is_finished()
        total += 0.0 if finished else made.seconds
        minutes, left = f"{made.seconds / 60:.1f}", "nothing" if finished else "all, at most"
        shown_.add_row(job.name, str(made.trials), str(made.repeats), minutes, left)
    out.print(shown_)
    out.print(
        f"about {total / 60:.1f} min on this machine; nothing was trained. The sweep files of the "
        f"cells that can run are in {options.folder}"
    )
    if skipped:
        sys.exit(_INCOMPLETE)


class _Obstacle(Exception):
    """Reason for which a cell is skipped."""


def _budget(options: ReproduceOptions) -> Budget:
    if options.seeds < LEAST_SEEDS:
        raise ConfigError(f"--seeds {options.seeds}: give at least {LEAST_SEEDS}, to show a spread")
    return Budget.of(options.budget)


def _ready(job: Job, options: ReproduceOptions, budget: Budget) -> ResolvedSweep:
    """The sweep of a cell, written to a file that can be launched.

    Raises:
        _Obstacle: If it cannot run here.
    """
    if job.obstacle:
        raise _Obstacle(job.obstacle)
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f"{job.name}.yaml"
    spec = spec_of(job, budget, options.seeds)
    head = f"# {job.cell.table}, {table(job.cell.table).source}\n"
    file.write_text(f"{head}{dump_yaml(spec)}", encoding="utf-8")
    needs = job.cell.needs
    try:
        sweep = load_sweep(file, options.settings)
    except ConfigError as e:
        if not needs:  # a mistake in an option is no obstacle of one cell
            raise
        raise _Obstacle(f"{e}. {needs}") from e
    try:
        check_sweep(sweep, fetch=options.fetch)
    except ConfigError as e:
        raise _Obstacle(f"{e}. {needs}" if needs else str(e)) from e
    return sweep


def _run(sweep: ResolvedSweep, options: ReproduceOptions, start: Callable[[], None]) -> bool:
    """Run what is left of a cell. False if it was stopped before its end.

    Args:
        start: Connects to Ray, if that was not done before.
    """
    state, out = StateFolder.at(options.state), console(quiet=options.quiet)
    folder, target = state.sweep(sweep.name), options.folder / f"{sweep.name}.best.yaml"
    place = orchestrator.Place(state, options.address, options.tracking_uri)
    screen = orchestrator.Screen(out, warn, lambda folder: "the same command")

    @contextlib.contextmanager
    def connect(sweep: ResolvedSweep) -> Iterator[None]:
        start()
        if options.address is not None:
            check_nodes(sweep, state.root)
        yield

    if folder.exists:
        study = open_study(sweep.name, state)
        study.sweep = check_changes(folder, study.sweep, sweep, accepted=options.accept)
        if study.is_finished():
            out.print(f"{sweep.name}: is finished")
            return True
    try:
        if folder.exists:
            outcome = orchestrator.resume(
                sweep.name, place, screen, out=target, file=sweep, connect=connect
            )
        else:
            outcome = orchestrator.launch(sweep, place, screen, out=target, connect=connect)
    except KeyboardInterrupt:  # the second one: trials go on from their last checkpoints
        return False
    return outcome.complete


def _result(job: Job, options: ReproduceOptions) -> Result:
    state = StateFolder.at(options.state)
    if not state.sweep(job.name).exists:
        return Result(job.cell, job.epsilon, remark="not run yet")
    try:
        return result_of(job, open_study(job.name, state))
    except DpSweepError as e:  # what is wrong with one cell must not cost the others their table
        return Result(job.cell, job.epsilon, remark=f"cannot be read: {e}")


def _write(options: ReproduceOptions, results: list[Result]) -> None:
    text = markdown(options.table, table(options.table), results)
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / f"{options.table}.md").write_text(text, encoding="utf-8")
    rows = json.dumps([row(result) for result in results], indent=2)
    (options.folder / f"{options.table}.json").write_text(rows + "\n", encoding="utf-8")


def _print(options: ReproduceOptions, results: list[Result]) -> None:
    narrow = [i for i, name in enumerate(HEADINGS) if name not in ("δ", "what differs")]
    columns = [HEADINGS[i] for i in narrow]
    title = f"{options.table}: {table(options.table).source}"
    shown_ = plain_table(title, columns, words=("row", "column", "method"))
    for result in results:
        cells_ = line(result)
        shown_.add_row(*(cells_[i] for i in narrow))
    out = console()
    out.print(shown_)
    for result in results:
        if result.remark:
            cell = result.cell
            out.print(f"- {cell.row}, {cell.column}, {cell.method}: {result.remark}", markup=False)
    place = options.folder / options.table
    out.print(f"table: {place}.md and {place.name}.json, with a sweep file for each cell beside it")
