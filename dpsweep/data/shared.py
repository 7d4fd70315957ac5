"""One copy of a data set for all processes of a node: a file that they map into memory.

Whoever needs it first reads the data set as it was published and writes its tensors to one
file; everybody else maps that file, and the system keeps its pages once. The copy holds
private examples: its folder is the user's alone (0700), as the files are.
"""

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpsweep.core.errors import StateError

Split = tuple[Tensor, Tensor]
"""Images, uint8, shape (N, C, H, W); labels, int64, shape (N,)."""


def shared(source: Path, read: Callable[[], Any], kind: str = "") -> Any:
    """What `read` returns, from this node's copy of it.

    Args:
        source: Folder or file that `read` reads. Another one, or a file in it of another size or
            age, has another copy.
        read: Returns tensors, in tuples. Called if there is no copy yet.
        kind: What else decides what `read` returns.

    Raises:
        StateError: If the folder of copies is not this user's alone.
    """
    place = folder() / f"{_mark(source, kind)}.pt"
    if not place.exists():
        handle = os.open(place.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(handle, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():  # while we waited, somebody else may have made it
                _write(place, read())
    return torch.load(place, mmap=True, weights_only=True)


def folder() -> Path:
    """Where this user's copies lie: DPSWEEP_CACHE, or a folder of the system's for such files."""
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


def _mark(source: Path, kind: str) -> str:
    """Of a folder or file: its path, and names, sizes and ages of its files."""
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    facts = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    told = (str(source.resolve()), facts, kind) if kind else (str(source.resolve()), facts)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


def _write(place: Path, tensors: Any) -> None:
    handle, name = tempfile.mkstemp(dir=place.parent)  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(tensors, file)
        os.replace(name, place)
    finally:
        Path(name).unlink(missing_ok=True)
