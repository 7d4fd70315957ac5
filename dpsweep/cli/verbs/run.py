"""The verbs that run trials on Ray: launch, resume."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from dpsweep.cli.say import NOTHING_COMPLETED, STOPPED, console, error, say, warn
from dpsweep.cli.verbs.sweeps import print_privacy
from dpsweep.config.sweep import ResolvedSweep, change_sweep, load_sweep
from dpsweep.results.best_trials import (
    list_best_by_budget,
    make_no_trial_error,
    make_summary_tables,
    name_config_file,
)
from dpsweep.results.compare import compare_methods
from dpsweep.results.comparison import print_comparison
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.export import default_target
from dpsweep.results.tables import format_budgets, num_trials_and_repeats, run_words, trial_table
from dpsweep.store.state_dir import StateFolder, SweepFolder
from dpsweep.store.storage import resolve_moved_uri, resolve_storage_uri
from dpsweep.tracking.server import redact_password

if TYPE_CHECKING:
    from dpsweep.app.orchestrator import Outcome, Screen


@dataclass(frozen=True)
class Options:
    """Options of launch and resume besides the sweep."""

    state: str | None
    address: str | None
    tracking_uri: str | None
    out: Path | None
    quiet: bool
    storage: str | None = None
    force: bool = False
    wait_seconds: float = 0.0

    def target(self, sweep: str) -> Path:
        """File that the best config is written to."""
        return self.out or default_target(sweep)


def launch(file: Path, settings: list[str], options: Options, *, fetch: bool, unique: bool) -> None:
    """Run a new sweep; every mistake is found before Ray is started or a file written."""
    state = StateFolder.at(options.state)

    def free_name(name: str) -> str:
        return next(n for n in _number_names(name) if not state.sweep(n).path.exists())

    sweep = load_sweep(file, settings, free_name if unique else None)
    trials = sweep.config.budget.trials
    runs = run_words(trials, sweep.num_runs - trials, explores=sweep.explores)
    say(
        f"{sweep.name}: {runs}, ε {format_budgets(sweep.epsilons)} a "
        f"{sweep.written.privacy.scope}. Checking the model, the data and the services ...",
        quiet=options.quiet,
    )
    # Ray, MLflow and torch take seconds: only now, when the file has no mistake.
    from dpsweep.app import orchestrator

    place = orchestrator.Place(
        state, options.address, options.tracking_uri, resolve_storage_uri(options.storage)
    )
    target = options.target(sweep.name)
    with _interruptible(state.sweep(sweep.name), options):
        outcome = orchestrator.launch(sweep, place, _screen(options), out=target, fetch=fetch)
    _print_outcome(outcome, options, target)


def load_named(named_or_file: str, settings: list[str]) -> tuple[str, ResolvedSweep | None]:
    """Return the name of a sweep that is named or whose file is, and what the file says now."""
    if not named_or_file.endswith((".yaml", ".yml")):
        return named_or_file, None
    file = load_sweep(named_or_file, settings)
    return file.name, file


def resume(
    named: str, file: ResolvedSweep | None, options: Options, *, settings: list[str], accept: bool
) -> None:
    """Go on with an old sweep.

    Args:
        file: What its file says now, settings included, if it is to be compared.
        settings: KEY=VALUE, to be taken over if they do no harm.
        accept: True to take over what changed in the file, if that does no harm.
    """
    state, name = StateFolder.at(options.state).part(named)
    if settings and file is None:
        from dpsweep.store.study import read_stored_sweep  # optuna takes a second

        file, accept = change_sweep(read_stored_sweep(name, state), settings), True
    from dpsweep.app import orchestrator

    place, target = (
        orchestrator.Place(state, options.address, storage=resolve_moved_uri(options.storage)),
        options.target(name),
    )
    with _interruptible(state.sweep(name), options):
        outcome = orchestrator.resume(
            name,
            place,
            _screen(options),
            out=target,
            file=file,
            accept=accept,
            force=options.force,
            wait_seconds=options.wait_seconds,
        )
    _print_outcome(outcome, options, target)


def _screen(options: Options) -> "Screen":
    from dpsweep.app.orchestrator import Screen

    return Screen(
        console(quiet=options.quiet), warn, lambda folder: _resume_command(folder, options)
    )


def _resume_command(folder: SweepFolder, options: Options) -> str:
    return f"{_program()} resume {folder.called}{_state_option(options)}"


def _state_option(options: Options) -> str:
    return "" if options.state is None else f" --state {options.state}"


@contextlib.contextmanager
def _interruptible(folder: SweepFolder, options: Options) -> Iterator[None]:
    """Say at a second Ctrl-C how to go on: the first lets trials save their state."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.exists:
            again = _resume_command(folder, options)
            warn([f"interrupted; trials go on from their last checkpoints with: {again}"])
        sys.exit(STOPPED)


def _print_outcome(outcome: "Outcome", options: Options, target: Path) -> None:
    """Print tables, statements and places; exit if the sweep was stopped or has no result."""
    out, us, state = console(quiet=options.quiet), _program(), _state_option(options)
    study, folder, best = outcome.study, outcome.folder, outcome.best
    if best:
        out.print(trial_table(best[:5], f"Best trials of {study.sweep.name}", show_state=False))
        for table in make_summary_tables(study):
            out.print(table)
        print_comparison(out, compare_methods(study))
        out.print(outcome.origin.describe_selection_bias(best[0]), markup=False)
        print_privacy(study, best[0], outcome.origin.search_words, folder.called, out)
        for record in list_best_by_budget(study):
            place = name_config_file(record, target)
            out.print(f"best config: {place}   train it again with: {us} train {place}")
    if disclosure_of(study.sweep).tells_trials:
        ran = run_words(*num_trials_and_repeats(study.records()), explores=study.sweep.explores)
        out.print(f"{ran} in {outcome.seconds:.1f} s")
    if not outcome.complete:
        out.print(f"Stopped. Go on with: {_resume_command(folder, options)}")
    if folder.tracking_uri:
        out.print(f"MLflow: {redact_password(folder.tracking_uri)}")
    else:
        out.print(f"Browse the trials in MLflow: {us} ui{state}")
    if not outcome.complete:
        sys.exit(STOPPED)
    if not best:
        error(str(make_no_trial_error(study, f"{us} status {folder.called}{state}")))
        sys.exit(NOTHING_COMPLETED)


def _program() -> str:
    """Get the command that the user types: a name, or a path where the name is not found."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m dpsweep"
    found = shutil.which(called.name)
    ours = found and called.exists() and Path(found).samefile(called)
    return called.name if ours or str(called) == called.name else str(called)


def _number_names(name: str) -> Iterator[str]:
    """name, name-2, name-3, ..."""
    yield name
    yield from (f"{name}-{i}" for i in count(2))
