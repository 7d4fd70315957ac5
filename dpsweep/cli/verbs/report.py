"""The verb report: a sweep as one page, and its figures as pictures."""

from pathlib import Path

from dpsweep.cli.say import say
from dpsweep.results.best_trials import make_no_result_error
from dpsweep.results.export import check_target, write
from dpsweep.results.figures import figures, write_pictures
from dpsweep.results.page import page
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.storage import resolve_moved_uri
from dpsweep.store.study import open_study


def report(
    name: str,
    out: Path | None,
    pictures: Path | None,
    state_folder: str | None,
    storage: str | None,
) -> None:
    """Write a sweep's page to `out` (report-NAME.html), and its figures to `pictures`."""
    place = out or Path(f"report-{name.replace('/', '-')}.html")
    check_target(place, "report", 'content="dpsweep')
    state = StateFolder.at(state_folder)
    study = open_study(name, state, resolve_moved_uri(storage))
    if not study.best():
        raise make_no_result_error(study, name)
    drawn = figures(study, state.sweep(name))
    if pictures:
        written = write_pictures(drawn, pictures)
        say(f"{len(written)} figures in {pictures}")
    write(place, page(study, drawn))
    say(f"report: {place}   open it in a browser; it needs no network")
