"""The verbs that read a state folder: status, stop, best, ui."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape

from dpsweep.cli.say import console, say
from dpsweep.core.errors import ConnectionRefused, DpSweepError, StateError
from dpsweep.privacy.statement import NO_EPSILON, format_epsilon
from dpsweep.results.best_trials import (
    choice_words,
    choose_trials,
    make_no_result_error,
    make_summary_tables,
)
from dpsweep.results.compare import compare_methods
from dpsweep.results.comparison import print_comparison
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.edges import edge_warnings
from dpsweep.results.export import origin_of
from dpsweep.results.rich_table import plain_table
from dpsweep.results.tables import format_budgets, num_trials_and_repeats, trial_row, trial_table
from dpsweep.search.charge import describe_trial_privacy, get_charged_run
from dpsweep.search.confirmation import summarize_repeats
from dpsweep.search.trial_record import Record
from dpsweep.store.lease import LeaseHolder
from dpsweep.store.state_dir import StateFolder, SweepFolder
from dpsweep.store.statement import compute_spending, describe_search_privacy, format_headline
from dpsweep.store.storage import resolve_moved_uri
from dpsweep.store.study import Study, open_study
from dpsweep.tracking.server import build_server_command, build_server_environment


def status(
    name: str | None, state_folder: str | None, as_json: bool, storage: str | None = None
) -> None:
    """Print all sweeps, or one sweep's trials."""
    state = StateFolder.at(state_folder)
    state.check_folder()
    if name is None:
        _show_all(state, as_json)
        return
    called = name
    state, name = state.part(name)
    study, owner = open_study(name, state, resolve_moved_uri(storage)), state.sweep(name).owner()
    records = study.records()
    if owner is None:
        records = [replace(r, state="interrupted") if r.state == "running" else r for r in records]
    if as_json:
        print(json.dumps([trial_row(record) for record in records], indent=2))
        return
    console().print(trial_table(records, f"{called}: {_whereabouts(study, owner, called)}"))
    for record in records:
        if record.reason:
            say(f"trial {record.number} failed: {record.reason}")
    if len(study.plans) > 1:
        say(describe_search_privacy(study))
    print_links(state.sweep(name), console())


def print_links(folder: SweepFolder, out: Console) -> None:
    """Print where the sweep can be looked at in a browser, a line each."""
    for what, address in folder.links().items():
        out.print(f"{what}: {address}", markup=False, soft_wrap=True)


def stop(name: str, state_folder: str | None, wait: float, *, force: bool = False) -> None:
    """Ask the driver to stop, and wait until it has."""
    folder = StateFolder.at(state_folder).sweep(name)
    folder.check_mine(force=force)
    if folder.owner() is None:
        raise StateError(f"sweep {name!r} is not running. Go on with: dpsweep resume {name}")
    try:
        folder.stop_request.touch()
    except PermissionError as e:
        raise StateError(
            f"sweep {name!r}: {folder.path} cannot be written by this account. Ask "
            f"{folder.owner_name}"
        ) from e
    end = time.monotonic() + wait
    while folder.owner() is not None:
        if time.monotonic() > end:
            raise StateError(
                f"sweep {name!r} was asked to stop and has not ended within {wait:g} s "
                f"({folder.owner()}). Wait longer with --wait, or end that process"
            )
        time.sleep(0.2)
    console().print(f"{name} is stopped. Go on with: dpsweep resume {name}")


def best(
    name: str, state_folder: str | None, top: int, as_json: bool, storage: str | None = None
) -> None:
    """Print the best trials and their privacy."""
    study = open_study(name, StateFolder.at(state_folder), resolve_moved_uri(storage))
    records = choose_trials(study, top)
    if as_json:
        rows = [trial_row(record) for record in records]
        choices = choice_words(study)
        for row, record in zip(rows, records, strict=True):
            # of the best of each epsilon, which comes first
            row["choice"] = choices.pop(record.epsilon, None)
            row["edges"] = edge_warnings(study.sweep, record)
        print(json.dumps(rows, indent=2))
        return
    if not records:
        raise make_no_result_error(study, name)
    console().print(trial_table(records, f"Best trials of {name}", show_state=False))
    for table in make_summary_tables(study):
        console().print(table)
    print_comparison(console(), compare_methods(study))
    origin = origin_of(study)
    say(f"Trial {records[0].number}: {origin.describe_selection_bias(records[0])}")
    print_privacy(study, records[0], origin.search_words, name, console())


def print_privacy(study: Study, record: Record, words: str, called: str, out: Console) -> None:
    """Print a trial's epsilon and the search's, and then what they mean.

    The search's statement stands in full where its headline alone could be misread, and else where
    the headline says that it is: five lines on composition after two numbers are not read.

    Args:
        called: Name by which the user knows the sweep.
    """
    whole, delta = format_headline(study)
    epsilon = record.epsilon or get_charged_run(record).epsilon(record.config.delta)
    alone = NO_EPSILON if record.void else format_epsilon(epsilon)
    if _keeps_one_epsilon(study, record):
        out.print(
            f"[bold]The best model for one epsilon, the search included: ε {whole}[/bold] "
            f"(δ {delta}). Trial {record.number} alone: ε {alone}"
        )
    else:
        out.print(
            f"[bold]ε {alone}[/bold] trial {record.number} alone, [bold]ε {whole}[/bold] the whole "
            f"search (δ {delta})"
        )
    out.print(describe_trial_privacy(record), markup=False)
    grew, learned = len(study.plans) > 1, study.warm_start is not None
    winner_alone = not disclosure_of(study.sweep).tells_trials
    if study.is_void or winner_alone or grew or learned:
        out.print(words, markup=False)
        return
    out.print(
        f"Other sweeps and runs on the same data are not counted. The search's whole statement: "
        f"dpsweep report {called}",
        markup=False,
    )


def _keeps_one_epsilon(study: Study, record: Record) -> bool:
    """True if one epsilon covers the search that came to this record, and all that chose it."""
    sweep, spent = study.sweep, compute_spending(study)
    is_model = record.final or not sweep.explores  # an exploring trial is not what was asked for
    return spent.shared and is_model and not (spent.void or spent.num_held_out)


def ui(state_folder: str | None, host: str, port: int, *, browse: bool = True) -> None:
    """Serve MLflow's UI until it is interrupted."""
    from dpsweep.compat import view_path

    state = StateFolder.at(state_folder)
    if not (state.root / "mlflow.db").exists():
        raise StateError(
            f"{state.root}: no results are tracked there yet. Launch a sweep first, or name "
            f"another folder with --state FOLDER"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise ConnectionRefused(
                f"--port {port}: {host}:{port} cannot be used ({e.strerror}). Name another with "
                f"--port {port + 1}"
            ) from e
    experiment = _find_newest(state.tracking_uri)
    root = f"http://{host}:{port}/"
    address = root + (view_path(experiment) if experiment else "")
    console().print(f"MLflow UI: {address}   (Ctrl-C ends it)", markup=False, soft_wrap=True)
    if experiment:
        charts = root + view_path(experiment, charts=True)
        console().print(f"charts: {charts}", markup=False, soft_wrap=True)
    command = build_server_command(state.tracking_uri, state.artifacts, host, port)
    server = subprocess.Popen(command, env=build_server_environment(), start_new_session=True)

    def end(number: int, frame: FrameType | None) -> None:
        os.killpg(server.pid, signal.SIGTERM)  # the server has a process of its own under it

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    if browse and sys.stdout.isatty() and _has_display():
        threading.Thread(target=_open_page, args=(server, host, port, address), daemon=True).start()
    server.wait()


def _find_newest(uri: str) -> str | None:
    """Id of the newest sweep's experiment; None if none is tracked."""
    from mlflow import MlflowClient  # takes seconds, and the other verbs here do without

    found = MlflowClient(uri).search_experiments(
        filter_string="name != 'Default'", order_by=["creation_time DESC"], max_results=1
    )
    return str(found[0].experiment_id) if found else None


def _has_display() -> bool:
    """True where a browser has a screen; else webbrowser would start one in the terminal."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


def _open_page(server: "subprocess.Popen[bytes]", host: str, port: int, address: str) -> None:
    """Open the address in the user's browser once the server answers."""
    while server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            webbrowser.open(address)
            return
        time.sleep(0.2)


def _show_all(state: StateFolder, as_json: bool) -> None:
    rows = [row for owned in [state, *state.others()] for row in _rows(owned, owned == state)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        console().print(f"No sweep in {state.root}. Launch one with: dpsweep launch FILE")
        return
    columns = ("sweep", "owner", "state", "trials + repeats", "best", "ε a trial")
    words = ("sweep", "owner", "state", "ε a trial")
    table = plain_table("Sweeps", columns, words=words, spare=("owner", "ε a trial"))
    for row in rows:
        known = row["trials"] is not None
        table.add_row(
            str(row["sweep"]),
            str(row["owner"]),
            escape(str(row["state"])),
            _progress(row) if known else "–",
            "–" if row["best"] is None else f"{row['best']:.4f}",
            format_budgets(row["epsilon"]) if known else "–",
        )
    console().print(table)


def _rows(owned: StateFolder, mine: bool) -> Iterator[dict[str, Any]]:
    """One owner's sweeps; of those that cannot be read, whose they are and why."""
    try:
        names = owned.names()
    except PermissionError:
        yield {**_UNKNOWN, "sweep": "–", "owner": owned.owner, "state": "private to their owner"}
        return
    for name in names:
        folder = owned.sweep(name)
        row = {**_UNKNOWN, "sweep": folder.name if mine else f"{owned.owner}/{name}"}
        try:
            study = open_study(name, owned)
            records = study.records()
        except DpSweepError as e:
            yield {**row, "owner": owned.owner, "state": f"cannot be read: {e}"}
            continue
        leader = next(iter(study.best()), None)
        repeats = summarize_repeats(records).get(leader.number) if leader else None
        ended, again = num_trials_and_repeats(r for r in records if r.state != "running")
        trials = study.sweep.config.budget.trials
        yield {
            **row,
            "owner": folder.owner_name,
            "state": _whereabouts(study, folder.owner(), str(row["sweep"])),
            "ended": ended,
            "trials": trials,
            "ended_repeats": again,
            "repeats": study.sweep.num_runs - trials,
            "best": repeats.mean if repeats else leader.value if leader else None,
            "confirmed": repeats is not None,
            "epsilon": list(study.sweep.epsilons),
        }


_UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("ended", "trials", "ended_repeats", "repeats", "best", "confirmed")),
    "epsilon": [],
}


def _progress(row: dict[str, Any]) -> str:
    """Runs that have ended of those planned, as 16/16 + 4/6 where configs are repeated."""
    repeats = f" + {row['ended_repeats']}/{row['repeats']}" if row["repeats"] else ""
    return f"{row['ended']}/{row['trials']}{repeats}"


def _whereabouts(study: Study, owner: LeaseHolder | None, called: str) -> str:
    """Describe the sweep's state: running, finished, or waiting to be resumed."""
    if owner:
        return f"running ({owner})"
    if study.is_finished():
        return "finished"
    return f"stopped; go on with: dpsweep resume {called}"
