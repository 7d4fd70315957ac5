"""The verbs that run trials on Ray: launch, resume."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from dpsweep.cli.say import NOTHING_COMPLETED, STOPPED, console, error, warn
from dpsweep.config.sweep import load_sweep
from dpsweep.execution.changes import may_grow
from dpsweep.results.export import default_target
from dpsweep.results.pareto import nothing_completed, summaries, target_of, winners
from dpsweep.results.ranking import standings, standings_table, verdict
from dpsweep.results.tables import trial_table
from dpsweep.store.state_dir import State
from dpsweep.store.storage import moved_to, named
from dpsweep.store.study import Study
from dpsweep.tracking.server import without_password

if TYPE_CHECKING:
    from dpsweep.execution.launch import Session


@dataclass(frozen=True)
class Options:
    """What launch and resume are told besides the sweep."""

    state: str | None
    address: str | None
    tracking_uri: str | None
    out: Path | None
    quiet: bool
    storage: str | None = None
    force: bool = False
    wait_seconds: float = 0.0

    def target(self, sweep: str) -> Path:
        """Where the best config goes."""
        return self.out or default_target(sweep)


def launch(file: Path, settings: list[str], options: Options, *, fetch: bool, unique: bool) -> None:
    """Runs a new sweep; every mistake is found before Ray is started or a file written."""
    sweep, state = load_sweep(file, settings), State.at(options.state)
    if unique:
        free = next(n for n in _numbered(sweep.name) if not state.sweep(n).path.exists())
        sweep = load_sweep(file, [*settings, f"name={free}"])
    # Ray, MLflow and torch take seconds: only now, when the file has no mistake.
    from dpsweep.app.preflight import Place, check
    from dpsweep.cluster.nodes import cluster_for
    from dpsweep.execution.launch import new_session

    place = Place(state, options.address, options.tracking_uri, named(options.storage))
    check(sweep, place, options.target(sweep.name), warn, fetch=fetch)
    with (
        cluster_for(sweep, state.root, options.address),
        new_session(sweep, state, place.tracking_uri, place.storage) as session,
    ):
        _run(session, options)


def resume(named_or_file: str, options: Options, *, accept: bool) -> None:
    """Goes on with an old sweep, by name or by its file."""
    file = load_sweep(named_or_file) if named_or_file.endswith((".yaml", ".yml")) else None
    state, name = State.at(options.state).part(file.name if file else named_or_file)
    from dpsweep.app.preflight import Place, reopened
    from dpsweep.cluster.nodes import cluster_for

    place = Place(state, options.address, storage=moved_to(options.storage))
    target, out = options.target(name), console(quiet=options.quiet)
    tell = (lambda words: None) if options.quiet else warn
    with reopened(
        name,
        place,
        target,
        tell,
        file=file,
        accept=accept,
        force=options.force,
        wait_seconds=options.wait_seconds,
    ) as session:
        out.print(_left(session.study))
        finished = session.study.is_finished()
        needed = cluster_for(session.sweep, state.root, options.address)
        with contextlib.nullcontext() if finished else needed:
            _run(session, options)


def _left(study: Study) -> str:
    """What a resumed sweep has done and has still to do."""
    name, done = study.sweep.name, [r for r in study.records() if r.state != "running"]
    if study.is_finished():
        if may_grow(study.sweep):
            more = "raise budget.trials in its file, then: dpsweep resume FILE --accept-changes"
        else:
            more = f"launch its file anew: dpsweep launch FILE --name {name}-2 --from {name}"
        return (
            f"{name}: is finished, with {len(done)} trials; results are delivered again. For more "
            f"trials {more}"
        )
    if study.sweep.is_private_selection:
        return f"{name}: goes on; nothing is told before its end"
    return (
        f"{name}: {len(done)} trials finished, {len(study.running())} adopted, "
        f"{study.num_to_ask()} to run"
    )


def _run(session: "Session", options: Options) -> None:
    from dpsweep.app.finalize import finish
    from dpsweep.results.live import Progress, shown

    out = console(quiet=options.quiet)
    progress = Progress(session, out)
    us, state = _program(), "" if options.state is None else f" --state {options.state}"
    again = f"{us} resume {session.folder.called}{state}"
    for words in session.prepare():
        out.print(words)
    try:
        with shown(progress):
            complete = session.run([progress])
    except KeyboardInterrupt:  # the second one: the first lets trials save their state
        warn([f"interrupted; trials go on from their last checkpoints with: {again}"])
        sys.exit(STOPPED)
    target = options.target(session.sweep.name)
    best, origin = finish(session, target, complete=complete)
    if best:
        out.print(trial_table(best[:5], f"Best trials of {session.sweep.name}", show_state=False))
        for table in summaries(session.study):
            out.print(table)
        compared = standings(session.study.records(), session.sweep.config.objective.direction)
        if compared:
            out.print(standings_table(compared))
            out.print(verdict(compared))
        out.print(origin.luck(best[0]))
        out.print(origin.search_words)
        for record in winners(session.study):
            place = target_of(record, target)
            out.print(f"best config: {place}   train it again with: {us} train {place}")
    if not session.sweep.is_private_selection:
        out.print(f"{len(session.study.records())} trials in {session.seconds:.1f} s")
    if not session.tracker.close():
        waiting = f"the tracking server did not take all results ({session.tracker.trouble})"
        warn([f"{waiting}; they wait in {session.folder.path}, and are delivered by: {again}"])
    if session.tracker.refused:
        warn([session.tracker.refused])
    if not complete:
        out.print(f"Stopped. Go on with: {again}")
    if session.folder.tracking_uri:
        out.print(f"MLflow: {without_password(session.folder.tracking_uri)}")
    else:
        out.print(f"Browse the trials in MLflow: {us} ui{state}")
    if not complete:
        sys.exit(STOPPED)
    if not best:
        see = f"{us} status {session.folder.called}{state}"
        error(str(nothing_completed(session.study, see)))
        sys.exit(NOTHING_COMPLETED)


def _program() -> str:
    """How the user calls us: by name, or by path where the name is not found."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m dpsweep"
    found = shutil.which(called.name)
    ours = found and called.exists() and Path(found).samefile(called)
    return called.name if ours or str(called) == called.name else str(called)


def _numbered(name: str) -> Iterator[str]:
    """name, name-2, name-3, ..."""
    yield name
    yield from (f"{name}-{i}" for i in count(2))
