"""The verb that shows and removes what killed processes left behind: gc."""

import json

from dpsweep.cli.say import console, say
from dpsweep.cluster.connect import orphans
from dpsweep.core.disk import format_bytes
from dpsweep.results.rich_table import plain_table
from dpsweep.store.garbage import Leftover, find_leftovers, make_leftover, remove_leftovers
from dpsweep.store.state_dir import StateFolder


def gc(
    state_folder: str | None,
    remove_them: bool,
    as_json: bool,
    *,
    name: str | None = None,
    force: bool = False,
) -> None:
    """List leftovers of one's own sweeps, or of one named sweep, and delete them if asked to."""
    state = StateFolder.at(state_folder)
    state.check_folder()
    if name is None:
        found = everything(state)
    else:
        folder = state.sweep(name)
        if remove_them:
            folder.check_mine(force=force)
        found = [one for one in find_leftovers(folder.state) if one.sweep == folder]
    gone = remove_leftovers(found) if remove_them else []
    if as_json:
        print(json.dumps([_row(one, one in gone) for one in found], indent=2))
        return
    if not found:
        say(f"{state.root}: nothing is left over.")
        return
    table = plain_table("Removed" if remove_them else "Left over")
    table.add_column("size", justify="right")
    for column in ("what", "where"):
        table.add_column(column, overflow="fold")
    for one in gone if remove_them else found:
        table.add_row(format_bytes(one.size_bytes), one.kind, one.place)
    console().print(table)
    total = format_bytes(sum(one.size_bytes for one in found))
    if not remove_them:
        console().print(f"{total} in all. Delete it with: dpsweep gc --remove")
    elif len(gone) < len(found):
        console().print(f"{len(found) - len(gone)} are in use by now, and stay.")


def everything(state: StateFolder) -> list[Leftover]:
    """Leftovers of the state folder, and of embedded clusters whose drivers died."""
    return [
        *find_leftovers(state),
        *(make_leftover("cluster of a dead driver", place) for place in orphans()),
    ]


def _row(one: Leftover, removed: bool) -> dict[str, object]:
    return {
        "kind": one.kind,
        "place": one.place,
        "bytes": one.size_bytes,
        "sweep": one.sweep.name if one.sweep else None,
        "removed": removed,
    }
