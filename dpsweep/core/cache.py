"""This user's cache on this node: copies of data sets, and results that are slow to compute."""

import contextlib
import functools
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import ParamSpec

from dpsweep.core.disk import write_atomically
from dpsweep.core.errors import DpSweepError, StateError

P = ParamSpec("P")


def cache_folder() -> Path:
    """Return the cache's folder: DPSWEEP_CACHE, or one of the system's for temporary files.

    Raises:
        StateError: If others can reach it: it holds copies of private data.
    """
    named = os.environ.get("DPSWEEP_CACHE")
    place = Path(named) if named else Path(tempfile.gettempdir()) / f"dpsweep-data-{os.getuid()}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise StateError(
            f"{place}: is meant for copies of private data, and others can reach it (owner "
            f"{found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}). Delete it, or name a folder "
            f"of yours in DPSWEEP_CACHE"
        )
    return place


def source_key(source: Path, kind: str) -> str:
    """Hash the path of a folder or file, the names, sizes and ages of its files, and `kind`."""
    if source.is_file():
        files = [source]
    else:  # reading a package may write compiled Python beside it
        found = (p for p in source.rglob("*") if "__pycache__" not in p.parts)
        files = sorted(p for p in found if p.is_file())
    facts = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    key = (str(source.resolve()), facts, kind) if kind else (str(source.resolve()), facts)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def check_once(key: str, source: Path, check: Callable[[], None]) -> None:
    """Run a check, unless it has passed on this node since `source` and this package changed.

    Args:
        key: All that the check depends on but files.
        source: Folder or file that it depends on.
        check: Raises where it fails; that is never kept.

    Raises:
        StateError: If the cache's folder is not this user's alone.
    """
    place = cache_folder() / f"passed-{source_key(source, f'{_code_key()} {key}')}"
    if not place.exists():
        check()
        place.touch(mode=0o600)


@functools.cache
def _code_key() -> str:
    """Hash what a check runs: this package's files, and torch's version."""
    return source_key(Path(__file__).parent.parent, metadata.version("torch"))


def cached_numbers(
    *packages: str,
) -> Callable[[Callable[P, list[float]]], Callable[P, list[float]]]:
    """Keep what a pure function of numbers returns, for every process of this user on this node.

    An entry holds its whole key: the arguments, the function's file with all that it computes
    with, and the versions of `packages`. One that is damaged, or of another key, is computed
    anew, and so is all where there is no cache to write to.

    Args:
        packages: Distributions whose version changes the result.
    """

    def decorate(function: Callable[P, list[float]]) -> Callable[P, list[float]]:
        @functools.cache
        def version() -> list[str]:
            source = Path(function.__code__.co_filename).read_bytes()
            found = [metadata.version(name) for name in packages]
            return [hashlib.sha256(source).hexdigest(), function.__qualname__, *found]

        @functools.wraps(function)
        def lookup(*args: P.args, **kwargs: P.kwargs) -> list[float]:
            key = [*version(), repr(args), repr(sorted(kwargs.items()))]
            try:
                folder = cache_folder() / "numbers"
                folder.mkdir(mode=0o700, exist_ok=True)
            except (OSError, DpSweepError):
                return function(*args, **kwargs)
            name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
            place = folder / f"{name}.json"
            if (found := _read(place, key)) is None:
                found = function(*args, **kwargs)
                _write(place, key, found)
            return found

        return lookup

    return decorate


def _read(place: Path, key: list[str]) -> list[float] | None:
    """Return an entry's numbers; None if there is none that can be trusted."""
    try:
        entry = json.loads(place.read_bytes())
        if entry["key"] != key or entry["check"] != _checksum(key, entry["numbers"]):
            return None
        return [float(number) for number in entry["numbers"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(place: Path, key: list[str], numbers: list[float]) -> None:
    entry = {"key": key, "numbers": numbers, "check": _checksum(key, numbers)}
    with contextlib.suppress(OSError, DpSweepError):  # a full disk: the result needs no copy
        write_atomically(place, json.dumps(entry).encode())


def _checksum(key: list[str], numbers: list[float]) -> str:
    return hashlib.sha256(json.dumps([key, numbers]).encode()).hexdigest()
