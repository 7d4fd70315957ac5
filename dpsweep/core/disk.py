"""Atomic writes of files, and the error for a full disk."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dpsweep.core.errors import DiskFull

_FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written in `folder`, or in the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def format_bytes(size: float) -> str:
    """Format a number of bytes with its unit.

    >>> format_bytes(1_234_567)
    '1.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@contextlib.contextmanager
def translate_disk_full(folder: Path) -> Iterator[None]:
    """Raise `DiskFull` where a write within this context meets a full disk or a spent quota."""
    try:
        yield
    except OSError as e:
        if e.errno in _FULL:
            raise disk_full_error(folder) from e
        raise


def disk_full_error(folder: Path) -> DiskFull:
    """Make the error for a write that found no space in `folder`."""
    return DiskFull(
        f"{folder}: the disk is full: {format_bytes(free_bytes(folder))} are free. Nothing that "
        f"was written before is lost. Free some space (dpsweep gc shows what can go), then go on "
        f"with: dpsweep resume NAME"
    )


def make_private_folder(place: Path) -> None:
    """Make a folder, and missing ones above it, for its owner alone (0700).

    Whatever the umask is: Path.mkdir(parents=True) leaves the folders above to it.

    Raises:
        FileExistsError: If it is there already.
    """
    if not place.parent.exists():
        with contextlib.suppress(FileExistsError):
            make_private_folder(place.parent)
    place.mkdir(mode=0o700)


def delete_written(place: Path) -> None:
    """Delete a file that `write_atomically` wrote, and the leftovers of killed writers."""
    for left in (place, *place.parent.glob(f".{place.name}.*")):
        left.unlink(missing_ok=True)


def write_atomically(
    place: Path, content: bytes, *, replace: bool = True, mode: int = 0o600
) -> None:
    """Write a file whole and durable, or not at all; only its owner can read it.

    Args:
        replace: False to leave a file alone that is there already.
        mode: Its permissions, if others are to read it.

    Raises:
        DiskFull: If there is no space; what was at `place` before is still there.
        FileExistsError: If it is there already and must not be replaced.
    """
    with translate_disk_full(place.parent):
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")  # 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                if mode != 0o600:
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            if replace:
                os.replace(name, place)
            else:
                os.link(name, place)  # fails, for all but one of several at once
        finally:
            Path(name).unlink(missing_ok=True)
        folder = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
