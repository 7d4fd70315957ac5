"""The verb that puts sweeps side by side: compare."""

import json
from pathlib import Path

from dpsweep.cli.say import console, say
from dpsweep.cli.verbs.route import refuse_elsewhere
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.results.compare import compare as put_side_by_side
from dpsweep.results.comparison import markdown, print_comparison, rows
from dpsweep.results.export import write
from dpsweep.results.groups import groups_of
from dpsweep.store.state_dir import StateFolder, SweepFolder
from dpsweep.store.storage import resolve_moved_uri
from dpsweep.store.study import open_study


def compare(
    names: list[str],
    state_folders: list[str],
    reference: str | None,
    *,
    any_model: bool,
    form: str,
    storage: str | None = None,
    out: Path | None = None,
) -> None:
    """Print what the methods of some sweeps came to, and which differences are more than noise.

    Args:
        state_folders: Where to look for them, in turn; the usual one if empty.
        form: table, json or markdown.
    """
    states = [StateFolder.at(folder) for folder in state_folders] or [StateFolder.at(None)]
    folders = [folder for name in dict.fromkeys(names) for folder in _find_folders(name, states)]
    moved = resolve_moved_uri(storage)
    groups = []
    for folder in folders:
        state = folder.state
        study = open_study(folder.name, state, moved)
        groups += groups_of(study, _short(state.root), driven=folder.owner() is not None)
    found = put_side_by_side(groups, reference, any_model=any_model)
    if out:
        from dpsweep.results.page import comparison_page  # plotly takes a second

        write(out, comparison_page(found, f"dpsweep compare {' '.join(names)} -o {out}"))
        say(f"page: {out}")
    elif form == "json":
        print(json.dumps(rows(found), indent=2))
    elif form == "markdown":
        print(markdown(found))
    else:
        print_comparison(console(), found)


def form_of(*, as_json: bool, as_markdown: bool) -> str:
    """table, json or markdown, from the two flags."""
    if as_json and as_markdown:
        raise ConfigError("--json and --markdown: give one of the two")
    return "json" if as_json else "markdown" if as_markdown else "table"


def _find_folders(name: str, states: list[StateFolder]) -> list[SweepFolder]:
    """The sweeps of a name, in every folder that has one."""
    found = [state.sweep(name) for state in states if state.sweep(name).exists]
    if not found:
        for state in states:
            refuse_elsewhere("compare", name, str(state.common))
        known = ", ".join(n for state in states for n in state.names()) or "none"
        places = ", ".join(str(state.root) for state in states)
        raise StateError(
            f"no sweep called {name!r} in {places}. Known: {known}. More state folders are named "
            f"with --state FOLDER, once for each"
        )
    return found


def _short(root: Path) -> str:
    """A state folder, relative to where the user is if it lies there."""
    return str(root.relative_to(Path.cwd())) if root.is_relative_to(Path.cwd()) else str(root)
