"""Run a sweep from its first check to its last file: preflight, run, finalize.

The only orchestrator: the command line, Python (dpsweep/api.py) and `reproduce` call `launch` and
`resume`. Every mistake is found before Ray is started or a file written, but this node's copy of
the data.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from dpsweep.cluster.nodes import cluster_for, find_node_faults
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import dump_trial
from dpsweep.core.errors import ConfigError, DpSweepError
from dpsweep.execution.elastic import FindFaults
from dpsweep.execution.launch import Session, create_session, reopen_session
from dpsweep.execution.preflight import check_files, check_services
from dpsweep.execution.tracking import STATEMENT, describe_retraining, make_test_secret_tags
from dpsweep.results.best_trials import list_best_by_budget, name_config_file
from dpsweep.results.compare import compare_methods
from dpsweep.results.comparison import sentences
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.export import Origin, check_target, origin_of, to_yaml, write
from dpsweep.results.figures import can_draw, figures, read_confusion, write_pictures
from dpsweep.results.live import LiveView, show_live
from dpsweep.results.page import page
from dpsweep.search.charge import describe_trial_privacy
from dpsweep.search.trial_record import Record
from dpsweep.search.warm_start import collect_earlier_trials
from dpsweep.store.state_dir import StateFolder, SweepFolder
from dpsweep.store.study import Study, open_study
from dpsweep.tracking.tracker import Facts
from dpsweep.training.check import check_sweep

_WEIGHTS_KEPT = 3

log = logging.getLogger(__name__)

Connect = Callable[[ResolvedSweep], AbstractContextManager[None]]
"""Connects to Ray for the length of a sweep."""


@dataclass(frozen=True)
class Place:
    """Locations of a sweep: state folder, cluster, tracking server, study storage."""

    state: StateFolder
    address: str | None = None  # of a Ray cluster; None for an embedded one
    tracking_uri: str | None = None  # of an MLflow server; None for a file in the state folder
    storage: str | None = None  # of the study; None for a file in the state folder


@dataclass(frozen=True)
class Screen:
    """Output of a run: console, warnings, and the command that resumes it."""

    console: Console  # gets the live view or, if it is no terminal, a line a trial
    warn: Callable[[list[str]], None]  # called with what is allowed and worth knowing
    # what the user types or calls to go on with a sweep, by its folder
    resume_command: Callable[[SweepFolder], str]


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    study: Study
    folder: SweepFolder  # where it lives
    best: list[Record]  # complete trials, the best first
    origin: Origin  # where they come from
    complete: bool  # False if the sweep was stopped and can go on
    seconds: float  # how long trials were run


def launch(
    sweep: ResolvedSweep,
    place: Place,
    screen: Screen,
    *,
    out: Path | None = None,
    fetch: bool = False,
    connect: Connect | None = None,
) -> Outcome:
    """Run a new sweep.

    Args:
        out: Where its best config goes; to the state folder alone if None.
        fetch: Whether missing data are downloaded.
        connect: Connects to Ray; to `place.address` for this sweep alone if None.

    Raises:
        DpSweepError: At the first mistake, before anything is started or written.
        KeyboardInterrupt: At a second Ctrl-C; trials go on from their last checkpoints.
    """
    check(sweep, place, out, screen.warn, fetch=fetch)
    with (
        _connection(sweep, place, connect),
        create_session(sweep, place.state, place.tracking_uri, place.storage) as session,
    ):
        return _run(session, screen, out, _choose_survey(session.sweep, place))


def resume(
    name: str,
    place: Place,
    screen: Screen,
    *,
    out: Path | None = None,
    file: ResolvedSweep | None = None,
    accept: bool = False,
    force: bool = False,
    wait_seconds: float = 0.0,
    connect: Connect | None = None,
) -> Outcome:
    """Go on with an old sweep; Ray is needed only if it is not finished.

    Args:
        place: Where it is to go on; `storage` if its study has moved.
        out: Where its best config goes; to the state folder alone if None.
        file: What its file says now, if it is to be compared.
        accept: True to take over what changed there, where that does no harm.
        force: True to drive somebody else's.
        wait_seconds: How long to wait for another driver.
        connect: As for `launch`.

    Raises:
        DpSweepError: At the first mistake; if there is none, or another process drives it.
        KeyboardInterrupt: At a second Ctrl-C; trials go on from their last checkpoints.
    """
    if out is not None:
        check_target(out)
    folder = place.state.sweep(name)
    folder.check_mine(force=force)
    check_files(place.state, folder.tracking_uri, place.storage or folder.storage_uri)
    with reopen_session(
        name, place.state, place.storage, file, accept=accept, wait_seconds=wait_seconds
    ) as session:
        if session.lease.taken_over and not screen.console.quiet:
            screen.warn([session.lease.taken_over])
        check_secrecy(session.sweep, place.address)
        words = disclosure_of(session.sweep).describe_rest(session.study)
        screen.console.print(words, markup=False)
        finished = session.study.is_finished()
        with nullcontext() if finished else _connection(session.sweep, place, connect):
            return _run(session, screen, out, _choose_survey(session.sweep, place))


def _connection(
    sweep: ResolvedSweep, place: Place, connect: Connect | None
) -> AbstractContextManager[None]:
    return connect(sweep) if connect else cluster_for(sweep, place.state.root, place.address)


def _choose_survey(sweep: ResolvedSweep, place: Place) -> FindFaults | None:
    """Choose the survey of nodes that join; none on an embedded cluster, which has one node."""
    return partial(find_node_faults, sweep, place.state.root) if place.address else None


def _run(
    session: Session, screen: Screen, out: Path | None, find_faults: FindFaults | None
) -> Outcome:
    session.find_faults = find_faults
    for words in session.prepare():
        screen.console.print(words)
    view = LiveView(session.study, screen.console)
    with show_live(view):
        complete = session.run([view])
    best, origin = finish(session, out, complete=complete)
    if not session.tracker.close():
        screen.warn(
            [
                f"the tracking server did not take all results ({session.tracker.trouble}); they "
                f"wait in {session.folder.path}, and are delivered by: "
                f"{screen.resume_command(session.folder)}"
            ]
        )
    if session.tracker.refused:
        screen.warn([session.tracker.refused])
    return Outcome(session.study, session.folder, best, origin, complete, session.seconds)


def check(
    sweep: ResolvedSweep,
    place: Place,
    out: Path | None,
    warn: Callable[[list[str]], None],
    *,
    fetch: bool = False,
) -> None:
    """Check a new sweep: its trials, its data, where it is to go, and who could watch it.

    Raises:
        DpSweepError: At the first mistake.
    """
    warn(check_sweep(sweep, fetch=fetch))
    if sweep.config.learn_from:
        earlier = open_study(sweep.config.learn_from, place.state)
        collect_earlier_trials(sweep, earlier.sweep, earlier.records())
    check_services(sweep, place.state, place.tracking_uri, place.storage)
    if out is not None:
        check_target(out)
    check_secrecy(sweep, place.address)


def check_secrecy(sweep: ResolvedSweep, address: str | None, option: str = "--address") -> None:
    """Raise ConfigError where others could watch a private selection; `option` named the place."""
    if sweep.is_private_selection and address:
        raise ConfigError(
            f"{option} {address}: accounting: private_selection keeps the number of trials and "
            f"the losing ones secret, and a cluster's own logs on every node would tell them. "
            f"Launch it on one machine without {option}, or write accounting: composition"
        )


def finish(session: Session, out: Path | None, *, complete: bool) -> tuple[list[Record], Origin]:
    """Write the best config, and to the parent run: statement, configs, weights of the best.

    Args:
        out: Where the best config goes beside the sweep's folder, if there is one.
        complete: False if the sweep was stopped and can go on.

    Returns:
        Complete trials, the best first, and where they come from.
    """
    study, tracker, folder = session.study, session.tracker, session.folder
    study.store_choice()  # a search that was stopped has not done so
    best, origin = study.best(), origin_of(study)
    compared = compare_methods(study)
    words = [*(sentences(compared) if compared else []), origin.search_words]
    figures_of_best: dict[str, str] = {}
    if best:
        words = [
            f"Best trial ({best[0].number}), by itself: {describe_trial_privacy(best[0])}",
            origin.describe_selection_bias(best[0]),
            *words,
        ]
        for record in list_best_by_budget(study):
            for place in filter(None, (out, folder.path / "best.yaml")):
                write(name_config_file(record, place), to_yaml(record, 1, origin))
        # as tags: a metric would be a section of charts with one dot, and none for any trial
        metric = study.sweep.config.objective.metric
        figures_of_best["dpsweep.best"] = f"{metric} {best[0].value:.4f}, trial {best[0].number}"
        if repeats := origin.confirmed.get(best[0].number):
            figures_of_best["dpsweep.confirmed"] = f"{metric} {repeats}"
    note = "\n\n".join(words)
    write(folder.path / "privacy.md", note + "\n")
    if not (complete or disclosure_of(study.sweep).tells_trials):
        return best, origin  # when it began and was stopped tells how many trials there are
    tags = {"dpsweep.complete": str(complete).lower(), STATEMENT: origin.search_words}
    tags |= figures_of_best | {"dpsweep.trials": str(origin.num_trials)}
    described = _description(words, study.sweep.name, best)
    tracker.sweep(Facts({}, tags | make_test_secret_tags(study), described))
    files = [
        name_config_file(record, folder.path / "best.yaml") for record in list_best_by_budget(study)
    ]
    for file in (folder.path / "sweep.yaml", *files, folder.path / "privacy.md"):
        tracker.artifact(file)
    for place in _write_report(session, best):
        tracker.artifact(place)
    for record in best[:_WEIGHTS_KEPT]:
        tracker.artifact(folder.trial_dir(record.number) / "weights.pt", record.number)
    tracker.sweep_end("FINISHED" if complete else "KILLED")
    return best, origin


def _description(words: list[str], name: str, best: list[Record]) -> str:
    """The parent run's page in Markdown: statements, the best config, how to go on."""
    parts = [f"**Privacy and result.** {words[0]}", *words[1:]]
    if best:
        parts.append(
            f"**Best config**, trial {best[0].number}. "
            f"{describe_retraining(dump_trial(best[0].config))}"
        )
    found = "`report.html` (all on one page, figures included), `best.yaml`, and " if best else ""
    parts.append(
        f"The artifacts hold {found}`sweep.yaml`, which searches again: "
        f"`dpsweep launch sweep.yaml --name {name}-again`."
    )
    return "\n\n".join(parts)


def _write_report(session: Session, best: list[Record]) -> list[Path]:
    """Write the report page and, where they can be drawn, pictures; return the paths written.

    A figure that cannot be drawn is logged: it must not cost the sweep its results.
    """
    if not best:
        return []
    folder, written = session.folder.path, list[Path]()
    try:
        drawn = figures(session.study, session.folder)
        if found := read_confusion(session.study, session.folder):
            write(folder / "confusion.csv", found.to_csv())
            written.append(folder / "confusion.csv")
        write(folder / "report.html", page(session.study, drawn))
        written.append(folder / "report.html")
        if drawn and can_draw():
            write_pictures(drawn, folder / "figures")
            written.append(folder / "figures")
    except DpSweepError as e:
        log.warning("the report is not complete: %s", e)
    return written
