"""The verbs that start and end a sweep service on this machine: up, down."""

import os
from pathlib import Path

from dpsweep.cli.say import console, say
from dpsweep.cluster.local import Local, alone
from dpsweep.cluster.services import check_installed, start_services
from dpsweep.core.disk import format_bytes
from dpsweep.core.errors import StateError
from dpsweep.store.state_dir import StateFolder


def up(state_folder: str | None, *, nodes: int, cpus: int | None, tracking: bool) -> None:
    """Start it, and print what to type next; what fails leaves nothing running."""
    if tracking:
        check_installed()
    folder = _folder(state_folder)
    share = cpus or max(1, (os.cpu_count() or 1) // nodes)
    with alone(folder):
        local = Local.at(folder)
        local.prepare(share)  # refuses if one is up, which then must stay up
        try:
            if tracking:
                start_services(local)
            local.start_nodes(nodes)
        except BaseException:
            local.down()
            raise
    out = console()
    out.print(f"{nodes} Ray nodes of {share} CPU are up: {local.jobs_address}", markup=False)
    if tracking:
        out.print(
            f"MLflow, user admin: {local.client_extra['MLFLOW_TRACKING_URI']}; its runs and the "
            f"studies are in PostgreSQL, its artifacts in an S3 store in memory",
            markup=False,
        )
    out.print(
        f"State of the sweeps there: {local.state}\n"
        f"Next, in this shell (the file holds addresses and passwords, and only you can read it):\n"
        f"  source {folder / 'env'}\n"
        f"  dpsweep submit sweeps/quickstart.yaml\n"
        f"From this machine also: dpsweep launch FILE --address {local.address}\n"
        f"Where only Ray's client port is open: dpsweep submit FILE --to {local.client_address}\n"
        f"End it with: dpsweep down",
        markup=False,
    )


def down(state_folder: str | None, *, remove: bool) -> None:
    """End exactly what `up` started; nothing to end is no mistake."""
    folder = _folder(state_folder)
    if not folder.exists():
        say(f"Nothing is up: {folder} does not exist.")
        return
    with alone(folder):
        local = Local.at(folder)
        ended = local.down()
        if remove:
            local.remove()
    kept = "" if remove or not folder.exists() else f" Its files stay in {folder}"
    if kept:
        size = sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file())
        kept += f" ({format_bytes(size)}), for the next `up`; `down --remove` deletes them."
    say(f"{ended} processes ended.{kept}")


def check_local(local: bool) -> None:
    """Raise StateError unless --local was said: nothing else is started for now."""
    if not local:
        raise StateError(
            "up: say --local: a cluster on this machine. For others see docs/guides/cluster.md"
        )


def _folder(state_folder: str | None) -> Path:
    return StateFolder.at(state_folder).common / "local"
