"""The verb that says what is wrong with an installation and a state folder: doctor.

A check is a function from what is to be looked at to its findings. It joins CHECKS, changes
nothing, and turns every error into a finding with a remedy.
"""

import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from rich.markup import escape

from dpsweep.cli.say import console
from dpsweep.cli.verbs.doctor.context import DoctorContext, Finding
from dpsweep.cli.verbs.doctor.elsewhere import cluster_nodes, ray_access, tracking
from dpsweep.cli.verbs.doctor.gpu import gpu_trial, gpus
from dpsweep.cli.verbs.doctor.permissions import credentials, permissions
from dpsweep.cli.verbs.gc import everything
from dpsweep.core import __version__
from dpsweep.core.disk import format_bytes, free_bytes
from dpsweep.core.errors import DpSweepError
from dpsweep.results.rich_table import plain_table
from dpsweep.store.filesystem import find_filesystem
from dpsweep.store.lease import may_be_suspended, read_last_holder
from dpsweep.store.state_dir import StateFolder, SweepFolder
from dpsweep.store.storage import check_rights, check_storage, resolve_storage_uri
from dpsweep.store.study import open_study
from dpsweep.tracking.server import redact_password
from dpsweep.tracking.spool import read_backlog

_PACKAGES = ("torch", "ray", "optuna", "mlflow", "sqlalchemy", "dp-accounting", "opacus")
_LITTLE_BYTES = 1e9
_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


Check = Callable[[DoctorContext], Iterator[Finding]]


def doctor(
    state_folder: str | None,
    storage: str | None,
    as_json: bool,
    *,
    address: str | None = None,
    tracking_uri: str | None = None,
    gpu: bool = False,
) -> None:
    """Run all checks and print what they found; exit with 1 if something fails."""
    context = DoctorContext(
        StateFolder.at(state_folder), resolve_storage_uri(storage), address, tracking_uri, gpu
    )
    found = [finding for check in CHECKS for finding in check(context)]
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        table = plain_table(f"{context.state.root}")
        for column in ("", "check", "found"):
            table.add_column(column, overflow="fold")
        for one in found:
            words = f"{one.words}. {one.remedy}" if one.remedy else one.words
            color = _COLORS[one.level]
            table.add_row(f"[{color}]{one.level}[/{color}]", one.check, escape(words))
        console().print(table)
    if any(finding.level == "fail" for finding in found):
        sys.exit(1)


def versions(context: DoctorContext) -> Iterator[Finding]:
    """Check which packages are installed, and their versions."""
    told = [f"dpsweep {__version__}", f"python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            told.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("versions", "fail", f"{name} is not installed", f"pip install {name}")
    yield Finding("versions", "ok", ", ".join(told))


def state_folder(context: DoctorContext) -> Iterator[Finding]:
    """Check that the state folder can be written, its file system and its free space."""
    root = context.state.root
    try:
        context.state.check_writable()
    except DpSweepError as e:
        yield Finding("state", "fail", str(e))
        return
    mount, free = find_filesystem(root), free_bytes(root)
    on = f"on {mount.kind} ({mount.point})" if mount else "on an unknown file system"
    yield Finding("state", "ok", f"writable, {on}")
    if mount and mount.is_shared and not (context.storage and context.tracking_uri):
        yield Finding(
            "state",
            "warn",
            f"{mount.kind} is shared between machines: SQLite is not safe there",
            "Launch with --storage postgresql://USER@HOST/DATABASE and --tracking-uri "
            "http://HOST:5000, or name a local folder with --state",
        )
    little = free < _LITTLE_BYTES
    remedy = "See what can go with: dpsweep gc" if little else ""
    yield Finding("disk", "warn" if little else "ok", f"{format_bytes(free)} are free", remedy)


def storages(context: DoctorContext) -> Iterator[Finding]:
    """Check that each study's database answers, and that its tables are this version's."""
    own = context.state.storage_uri
    uris = {folder.storage_uri: None for folder in context.sweeps}
    for uri in {**uris, **({context.storage: None} if context.storage else {})}:
        if uri == own and not (context.state.root / "study.db").exists():
            yield Finding("storage", "fail", f"{context.state.root / 'study.db'} is gone", _RESTORE)
            continue
        try:
            check_storage(uri)
            check_rights(uri)
            yield Finding("storage", "ok", f"{redact_password(uri)} answers")
        except DpSweepError as e:
            yield Finding("storage", "fail", str(e))


_RESTORE = "Restore it: it alone knows what the trials have spent"


def studies(context: DoctorContext) -> Iterator[Finding]:
    """Check that each sweep has its study."""
    for folder, wrong in context.read():
        if wrong:
            yield Finding(f"sweep {folder.name}", "fail", wrong)
    for folder in context.sweeps:
        if not _may_open(folder, context.state):
            continue
        try:
            study = open_study(folder.name, context.state)
            yield Finding(f"sweep {folder.name}", "ok", f"{study.num_asked()} trials asked for")
        except DpSweepError as e:
            yield Finding(f"sweep {folder.name}", "fail", str(e))


def leases(context: DoctorContext) -> Iterator[Finding]:
    """Report which sweeps are driven, and which drivers died."""
    for folder in context.sweeps:
        owner, last = folder.owner(), read_last_holder(folder.path)
        check = f"sweep {folder.name}"
        if owner and may_be_suspended(folder.path):
            yield Finding(
                check,
                "warn",
                f"driven by {owner}, which is silent: suspended?",
                f"Wake it with kill -CONT {owner.pid} on {owner.host}, or end it",
            )
        elif owner:
            yield Finding(check, "ok", f"driven by {owner}")
        elif last:
            yield Finding(
                check,
                "warn",
                f"its driver, process {last.pid} on {last.host}, died",
                f"Go on with: dpsweep resume {folder.name}",
            )


def spools(context: DoctorContext) -> Iterator[Finding]:
    """Report the events that wait for each sweep's tracking server, and those it refused."""
    for folder in context.sweeps:
        lies, check = read_backlog(folder.path), f"sweep {folder.name}"
        if lies.waiting and folder.owner() is None:
            yield Finding(
                check,
                "warn",
                f"{lies.waiting} entries wait for the tracking server",
                f"Deliver them with: dpsweep resume {folder.name}",
            )
        if lies.refused:
            yield Finding(
                check,
                "warn",
                f"the tracking server refused {lies.refused} entries, the last one: {lies.reason}",
                f"They are in {folder.path / 'spool.refused.jsonl'}",
            )


def left_over(context: DoctorContext) -> Iterator[Finding]:
    """Report the files that killed processes left behind."""
    found = everything(context.state)
    if found:
        size = format_bytes(sum(one.size_bytes for one in found))
        yield Finding("leftovers", "warn", f"{len(found)}, {size}", "See them with: dpsweep gc")
    else:
        yield Finding("leftovers", "ok", "none")


def _may_open(folder: SweepFolder, state: StateFolder) -> bool:
    """False if opening the study would make the file it should be in."""
    return folder.storage_uri != state.storage_uri or (state.root / "study.db").exists()


CHECKS: tuple[Check, ...] = (
    versions,
    gpus,
    gpu_trial,
    state_folder,
    permissions,
    credentials,
    storages,
    studies,
    leases,
    tracking,
    spools,
    left_over,
    ray_access,
    cluster_nodes,
)
