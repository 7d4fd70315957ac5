"""The verb watch: a running sweep seen from another terminal, without touching it."""

import threading
from types import FrameType

from dpsweep.cli.say import console
from dpsweep.cli.verbs.sweeps import print_links
from dpsweep.core.errors import StateError
from dpsweep.core.signals import handle_signals
from dpsweep.results.live import LiveView, follow_sweep
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.storage import resolve_moved_uri
from dpsweep.store.study import open_study

_PAUSE_SECONDS = 1.0


def watch(
    name: str | None, state_folder: str | None, storage: str | None, port: int | None = None
) -> None:
    """Show a running sweep until it ends or Ctrl-C; nothing is written anywhere.

    Args:
        name: The sweep; the one that runs if None.
        port: Serve its report to a browser there, until Ctrl-C alone; 0 for any free port.

    Raises:
        StateError: If no sweep runs, or several do and none is named.
        ConnectionRefused: If the port cannot be listened on.
    """
    state = StateFolder.at(state_folder)
    name = name or _the_running(state)
    folder = state.sweep(name)
    study = open_study(name, state, resolve_moved_uri(storage))
    left = threading.Event()

    def leave(number: int, frame: FrameType | None) -> None:
        left.set()

    with handle_signals(leave):
        view = LiveView(study, console(), folder.owner)
        print_links(folder, console())
        if port is None:
            follow_sweep(view, lambda: left.wait(_PAUSE_SECONDS))
            return
        from dpsweep.results.web import LivePage, serve_page  # figures take seconds to import

        with serve_page(LivePage(study, view, folder), port) as address:
            words = f"live report: {address}   (Ctrl-C ends it; the sweep goes on)"
            console().print(words, markup=False, soft_wrap=True)
            left.wait()


def _the_running(state: StateFolder) -> str:
    """The one sweep that runs."""
    running = [name for name in state.names() if state.sweep(name).owner()]
    if len(running) == 1:
        return running[0]
    known = ", ".join(running or state.names()) or "none"
    what = "several sweeps run" if running else "no sweep runs"
    raise StateError(
        f"{what} in {state.root}. Name one: dpsweep watch SWEEP. "
        f"{'Running' if running else 'Known'}: {known}. Another state folder is named with "
        f"--state FOLDER"
    )
