"""Doctor's checks of who can read what: the state folder, and files that hold tokens."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dpsweep.cli.verbs.doctor.context import DoctorContext, Finding
from dpsweep.store.owner import VARIABLE, get_login_name, whoami
from dpsweep.store.state_dir import OWNERS, StateFolder

_OTHERS = 0o077
_PRIVATE = ("sweep.json", "secret", "checkpoint.pt", "selection.json", "error.txt")
"""Files of a sweep that hold secrets, passwords or resume state."""

_KEPT = (
    *(f"local/{name}" for name in ("env", "ray_token", "secrets.json", "pgpass", "up.json")),
    "local/basic_auth.ini",
    "submitted/*.json",
)
"""Files of a state folder that hold tokens, passwords and addresses of clusters, 0600 all."""

_TOKENS = (
    ("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token"),
    ("", "~/.mlflow/credentials"),
    ("PGPASSFILE", "~/.pgpass"),
    ("NETRC", "~/.netrc"),
)
"""Files that hold tokens and passwords: the variable that names another place, the usual one."""


def permissions(context: DoctorContext) -> Iterator[Finding]:
    """Check that nobody else can read or write what is private here."""
    state = context.state
    yield Finding("owner", "ok", f"you are {whoami()} here; {_others(state)}")
    if not state.root.exists():
        return
    try:
        yield from _folder(state)
        yield from _check_shared(state)
        exposed = list(_list_exposed(state))
    except PermissionError as e:
        yield Finding("permissions", "fail", f"{e.filename}: {e.strerror}", "Ask its owner")
        return
    if exposed:
        yield Finding(
            "permissions",
            "fail",
            f"{len(exposed)} files or folders with secrets can be reached by others, the first: "
            f"{exposed[0]}",
            f"chmod -R go= {state.root / 'sweeps'}. What was in them may be known: trials that "
            f"run have no privacy left if it is",
        )
    else:
        yield Finding("permissions", "ok", "what is private here is its owner's alone")


def credentials(context: DoctorContext) -> Iterator[Finding]:
    """Check that files with tokens and passwords are private to their owner."""
    for variable, usual in _TOKENS:
        place = Path(os.environ.get(variable) or usual).expanduser()
        try:
            mode = stat.S_IMODE(place.stat().st_mode)
        except OSError:
            continue
        if mode & _OTHERS:
            words = f"{place} holds tokens or passwords, and its mode is {mode:04o}"
            yield Finding("credentials", "warn", words, f"chmod 600 {place}")
        else:
            yield Finding("credentials", "ok", f"{place} is its owner's alone")
    yield from _cluster_files(context.state)


def _cluster_files(state: StateFolder) -> Iterator[Finding]:
    """Files of `up` and `submit` that others can reach."""
    roots = dict.fromkeys((state.root, state.common))  # `up` is everybody's, `submit` one owner's
    for place in sorted(p for root in roots for pattern in _KEPT for p in root.glob(pattern)):
        mode = stat.S_IMODE(place.stat().st_mode)
        if mode & _OTHERS:
            words = f"{place} tells how to reach a cluster, and its mode is {mode:04o}"
            remedy = f"chmod 600 {place}; what was in it may be known: see dpsweep down --remove"
            yield Finding("credentials", "warn", words, remedy)


def _others(state: StateFolder) -> str:
    names = [str(other.owner) for other in state.others()]
    return f"others: {', '.join(names)}" if names else f"nobody else is ({VARIABLE} changes that)"


def _folder(state: StateFolder) -> Iterator[Finding]:
    """Check the mode of an owner's own part of the state folder."""
    found = state.root.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        words = (
            f"{state.root} is {get_login_name(found.st_uid)}'s, and you run as "
            f"{get_login_name(os.geteuid())}"
        )
        yield Finding("permissions", "warn", words, "Work under one account, or name another")
    if mode & 0o022:
        yield Finding(
            "permissions",
            "fail",
            f"{state.root} can be written by others (mode {mode:04o}): who can replace its files "
            f"decides what a resumed sweep runs",
            f"chmod 700 {state.root}",
        )
    elif mode & _OTHERS:
        yield Finding(
            "permissions",
            "warn",
            f"{state.root} can be read by others (mode {mode:04o}), results before they are told "
            f"included",
            f"chmod 700 {state.root}",
        )


def _check_shared(state: StateFolder) -> Iterator[Finding]:
    """Check that a folder of several owners keeps their parts apart."""
    place = state.common / OWNERS
    if not place.is_dir():
        return
    mode = place.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        yield Finding(
            "permissions",
            "fail",
            f"{place} can be written by others and is not sticky (mode {stat.S_IMODE(mode):04o}): "
            f"anybody may put a folder in the place of yours",
            f"chmod 3770 {place}, and give it to the group with chgrp",
        )
    elif mode & 0o020 and not mode & stat.S_ISGID:
        words = f"{place} has no setgid bit: new parts are not their group's"
        yield Finding("permissions", "warn", words, f"chmod 3770 {place}")


def _list_exposed(state: StateFolder) -> Iterator[Path]:
    """Private files and folders that others can reach by their own modes."""
    for folder in sorted((state.root / "sweeps").glob("*")):
        if not folder.is_dir() or folder.is_symlink():
            continue
        if folder.stat().st_mode & _OTHERS:
            yield folder
        for name in _PRIVATE:
            for place in (folder / name, *folder.glob(f"trials/*/{name}")):
                if place.exists() and place.stat().st_mode & _OTHERS:
                    yield place
