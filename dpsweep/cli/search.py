"""The verbs that run trials on Ray: plan, launch, resume."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from dpsweep.cli.say import console, warn
from dpsweep.cluster.connect import cluster
from dpsweep.config.sweep import Sweep, load_sweep
from dpsweep.report.export import check_target, default_target
from dpsweep.report.finish import finish
from dpsweep.report.live import Progress, shown
from dpsweep.report.tables import trial_table
from dpsweep.report.winner import standings, standings_table, verdict
from dpsweep.track.server import without_password
from dpsweep.train.check import check_sweep
from dpsweep.tune.check import check_services
from dpsweep.tune.check import plan as make_plan
from dpsweep.tune.launch import Session, concurrency, new_session, old_session
from dpsweep.tune.state import State

_STOPPED = 130
"""Exit code of a sweep that was stopped before its end, as for a program ended by Ctrl-C."""


@dataclass(frozen=True)
class Options:
    """What launch and resume are told besides the sweep."""

    state: str | None
    address: str | None
    tracking_uri: str | None
    out: Path | None
    quiet: bool

    def target(self, sweep: str) -> Path:
        """Where the best config goes."""
        return self.out or default_target(sweep)


def plan(file: Path, settings: list[str], as_json: bool) -> None:
    """Prints what a sweep will take on this machine."""
    sweep = load_sweep(file, settings)
    warn(check_sweep(sweep))
    cores = {"CPU": float(os.cpu_count() or 1), "GPU": float(sweep.config.resources.gpu > 0)}
    made = make_plan(sweep, concurrency(sweep.config.resources, cores))
    if as_json:
        print(json.dumps(asdict(made), indent=2))
        return
    (low, high), (fewest, most) = made.noise, made.steps
    console().print(
        f"[bold]{sweep.name}[/bold]: {made.trials} trials, {made.at_once} at once on this machine\n"
        f"steps      {fewest} to {most} a trial\n"
        f"noise      {low:.3f} to {high:.3f} times the clip norm, calibrated trial by trial\n"
        f"a trial    {made.trial_words}\n"
        f"expected   {made.search_words}\n"
        f"time       about {made.seconds / 60:.1f} min here, from a probe of a few steps\n"
        f"disk       about {made.disk_bytes / 1e6:.1f} MB while it runs"
    )


def launch(file: Path, settings: list[str], options: Options, *, fetch: bool, unique: bool) -> None:
    """Runs a new sweep; every mistake is found before Ray is started or a file written."""
    sweep, state = load_sweep(file, settings), State.at(options.state)
    if unique:
        free = next(n for n in _numbered(sweep.name) if not state.sweep(n).path.exists())
        sweep = load_sweep(file, [*settings, f"name={free}"])
    warn(check_sweep(sweep, fetch=fetch))
    check_services(sweep, state, options.tracking_uri)
    check_target(options.target(sweep.name))
    with cluster(options.address):
        _drive(sweep, new_session(sweep, state, options.tracking_uri), options)


def resume(name: str, options: Options) -> None:
    """Goes on with an old sweep."""
    check_target(options.target(name))
    session = old_session(name, State.at(options.state))
    with session as opened:
        done = [r for r in opened.study.records() if r.state != "running"]
        left = opened.study.running()
        total = opened.sweep.config.budget.trials
        new = max(0, total - opened.study.num_asked())
        if not options.quiet:
            console().print(
                f"{name}: {len(done)} trials finished, {len(left)} adopted, {new} to run"
            )
        with cluster(options.address):
            _run(opened, options)


def _drive(sweep: Sweep, session: AbstractContextManager[Session], options: Options) -> None:
    with session as opened:
        _run(opened, options)


def _run(session: Session, options: Options) -> None:
    out = console(quiet=options.quiet)
    progress = Progress(session, out)
    with shown(progress):
        complete = session.run([progress])
    target = options.target(session.sweep.name)
    best, origin = finish(session, target, complete=complete)
    us, state = _program(), "" if options.state is None else f" --state {options.state}"
    if best:
        out.print(trial_table(best[:5], f"Best trials of {session.sweep.name}", show_state=False))
        compared = standings(session.study.records(), session.sweep.config.objective.direction)
        if compared:
            out.print(standings_table(compared))
            out.print(verdict(compared))
        out.print(origin.search_words)
        out.print(f"best config: {target}   train it again with: {us} train {target}")
    elif complete:
        out.print(f"No trial was completed. See why with: {us} status {session.sweep.name}{state}")
    out.print(f"{len(session.study.records())} trials in {session.seconds:.1f} s")
    if not session.tracker.close():
        waiting = f"the tracking server did not take all results ({session.tracker.trouble})"
        again = f"{us} resume {session.sweep.name}{state}"
        warn([f"{waiting}; they wait in {session.folder.path}, and are delivered by: {again}"])
    if not complete:
        out.print(f"Stopped. Go on with: {us} resume {session.sweep.name}{state}")
    if session.folder.tracking_uri:
        out.print(f"MLflow: {without_password(session.folder.tracking_uri)}")
    else:
        out.print(f"Browse the trials in MLflow: {us} ui{state}")
    if not complete:
        sys.exit(_STOPPED)


def _program() -> str:
    """How the user calls us: by name, or by path where the name is not found."""
    called = Path(sys.argv[0])
    found = shutil.which(called.name)
    return called.name if found and Path(found).samefile(called) else str(called)


def _numbered(name: str) -> Iterator[str]:
    """name, name-2, name-3, ..."""
    yield name
    yield from (f"{name}-{i}" for i in count(2))
