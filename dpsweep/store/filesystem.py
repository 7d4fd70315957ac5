"""File system of a folder, and whether SQLite's locks are reliable on it.

SQLite needs locks and shared memory that hold for everybody who opens the file. On a file system
that several machines share they do not: databases there are lost sooner or later.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from dpsweep.core.errors import StateError

MOUNTS = Path("/proc/self/mounts")

_SHARED = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "9p", "virtiofs", "prl_fs", "vboxsf"),
    *("lustre", "gpfs", "beegfs", "ceph", "glusterfs", "orangefs", "pvfs2", "ocfs2", "gfs2"),
    *("panfs", "wekafs", "quobyte", "moosefs", "juicefs", "davfs", "coda", "acfs"),
}
"""Kernel's names. With FUSE the name follows a dot: fuse.sshfs."""

_SHARED_FUSE = {
    *("sshfs", "glusterfs", "ceph", "ceph-fuse", "s3fs", "gcsfuse", "blobfuse", "blobfuse2"),
    *("rclone", "juicefs", "mfs", "moosefs", "davfs", "davfs2", "goofys", "beegfs", "quobyte"),
    *("lizardfs", "seaweedfs", "mount-s3", "curlftpfs", "smbnetfs", "cvmfs2", "dfuse"),
    "gvfsd-fuse",
}
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One mounted file system."""

    point: Path  # where it is mounted
    kind: str  # its type, as the kernel names it
    source: str  # the device or server

    @property
    def is_shared(self) -> bool:
        """True if several machines may have it mounted at once."""
        base, dot, name = self.kind.partition(".")
        if base in ("fuse", "fuseblk"):
            return name in _SHARED_FUSE if dot else self.source.partition(":")[2].startswith("/")
        return base in _SHARED


def find_mount(folder: Path, mounts: str) -> Mount | None:
    r"""The file system `folder` is on, from the text of /proc/self/mounts.

    Args:
        folder: Absolute, without symbolic links.
        mounts: A line each: source, mount point, type, options. Of two at one place the last
            counts.

    >>> find_mount(Path("/data/x"), "/dev/sda / ext4 rw 0 0\nh:/d /data nfs4 rw 0 0").kind
    'nfs4'
    """
    best: Mount | None = None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        source, point, kind = (_OCTAL.sub(lambda m: chr(int(m[1], 8)), f) for f in fields[:3])
        mount = Mount(Path(point), kind, source)
        deeper = best is None or len(mount.point.parts) >= len(best.point.parts)
        if folder.is_relative_to(mount.point) and deeper:
            best = mount
    return best


def find_filesystem(folder: Path) -> Mount | None:
    """The file system `folder` is on, or would be; None where the system does not say."""
    try:
        return find_mount(folder.resolve(), MOUNTS.read_text(errors="surrogateescape"))
    except OSError:
        return None


def check_local(file: Path, what: str, remedy: str) -> None:
    """Raise StateError if a SQLite file would lie on a file system that machines share.

    Args:
        file: The database.
        what: What it holds, for the message.
        remedy: What to type instead.
    """
    mount = find_filesystem(file.parent)
    if mount and mount.is_shared:
        raise StateError(
            f"{file}: {what} would be a SQLite file on {mount.kind} ({mount.source} at "
            f"{mount.point}), where its locks do not hold between machines and it gets corrupted. "
            f"{remedy}"
        )
