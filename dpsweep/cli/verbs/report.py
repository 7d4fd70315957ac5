"""The verb report: a sweep as one page, and its figures as pictures."""

from pathlib import Path

from dpsweep.cli.say import console
from dpsweep.core.errors import StateError
from dpsweep.results.best_trials import make_no_result_error
from dpsweep.results.figures import figures, write_pictures
from dpsweep.results.page import page, write_page
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.storage import resolve_moved_uri
from dpsweep.store.study import open_study

_HEAD_CHARS = 1000
"""Bytes of a file read to tell if it is one of our pages: its head says so."""


def report(
    name: str,
    out: Path | None,
    pictures: Path | None,
    state_folder: str | None,
    storage: str | None,
) -> None:
    """Write a sweep's page to `out` (report-NAME.html), and its figures to `pictures`."""
    place = out or Path(f"report-{name.replace('/', '-')}.html")
    _check_target(place)
    state = StateFolder.at(state_folder)
    study = open_study(name, state, resolve_moved_uri(storage))
    if not study.best():
        raise make_no_result_error(study, name)
    drawn = figures(study, state.sweep(name))
    if pictures:
        written = write_pictures(drawn, pictures)
        console().print(f"{len(written)} figures in {pictures}", markup=False)
    write_page(place, page(study, drawn))
    console().print(f"report: {place}   open it in a browser; it needs no network", markup=False)


def _check_target(place: Path) -> None:
    """Raise StateError if the page would overwrite something else."""
    if place.is_dir():
        raise StateError(f"-o {place}: is a folder. Name a file, such as -o {place}/report.html")
    if place.exists():
        with place.open(encoding="utf-8", errors="replace") as file:
            if 'content="dpsweep' not in file.read(_HEAD_CHARS):
                raise StateError(
                    f"-o {place}: exists and is not one of our reports; it is left alone. Name "
                    f"another file with -o FILE"
                )
