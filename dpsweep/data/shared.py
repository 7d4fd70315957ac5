"""One copy of a data set for all processes of a node: a file that they map into memory.

Whoever needs it first reads the data set as it was published and writes its tensors to one
file; everybody else maps that file, and the system keeps its pages once. The copy holds
private examples: its folder is the user's alone (0700), as the files are.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpsweep.core.cache import cache_folder, source_key

Split = tuple[Tensor, Tensor]
"""Images, uint8, shape (N, C, H, W); labels, int64, shape (N,)."""


_KEPT = 2
"""Copies of one series from one source that stay although nobody uses them."""

_in_use: dict[str, int] = {}
"""Series -> the lock that this process holds of the copy that it uses."""


def load_shared(source: Path, read: Callable[[], Any], kind: str = "", series: str = "") -> Any:
    """Load what `read` returns, from this node's copy if there is one.

    Args:
        source: Folder or file that `read` reads. Another one, or a file in it of another size or
            age, has another copy.
        read: Returns tensors, in tuples. Called if there is no copy yet.
        kind: What else decides what `read` returns.
        series: Name of copies of which there may be ever more: of each source the latest few stay,
            and those that some process used last. Empty for a copy that stays.

    Raises:
        StateError: If the folder of copies is not this user's alone.
    """
    name = source_key(source, kind)
    if series:
        series = f"{series}-{hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]}"
        name = f"{series}-{name}"
    place = cache_folder() / f"{name}.pt"
    if series:  # from now on nobody deletes it
        _mark_in_use(series, place)
    if not place.exists():
        handle = _open_lock(place, ".lock")
        with os.fdopen(handle, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():  # while we waited, somebody else may have made it
                _write_tensors(place, read())
    if series:
        _delete_oldest(series, place)
    return torch.load(place, mmap=True, weights_only=True)


def _mark_in_use(series: str, place: Path) -> None:
    """Mark a copy as used by this process, until it uses another of the series."""
    if (before := _in_use.pop(series, None)) is not None:
        os.close(before)
    _in_use[series] = lock = _open_lock(place, ".used")
    fcntl.flock(lock, fcntl.LOCK_SH)


def _delete_oldest(series: str, place: Path) -> None:
    """Delete copies of a series but for the last few; `place` is used now."""
    os.utime(place, ns=(time.time_ns(), place.stat().st_mtime_ns))
    ages = []
    for copy in place.parent.glob(f"{series}-*.pt"):
        with contextlib.suppress(FileNotFoundError):  # another process tidies as well
            ages.append((copy.stat().st_atime_ns, copy))
    for _, copy in sorted(ages)[:-_KEPT]:
        _delete_unused(copy)


def _delete_unused(copy: Path) -> None:
    """Delete a copy that nobody uses; its empty locks stay, as others may wait for them."""
    lock = _open_lock(copy, ".used")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        copy.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _open_lock(place: Path, suffix: str) -> int:
    """Open a lock of a copy, not held yet."""
    return os.open(place.with_suffix(suffix), os.O_WRONLY | os.O_CREAT, 0o600)


def _write_tensors(place: Path, tensors: Any) -> None:
    handle, name = tempfile.mkstemp(dir=place.parent)  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(tensors, file)
        os.replace(name, place)
    finally:
        Path(name).unlink(missing_ok=True)
