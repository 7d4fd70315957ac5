"""A state folder on a file system that machines share is told by its mount."""

from pathlib import Path

import pytest

from dpsweep.core.errors import StateError
from dpsweep.store import filesystem as mounts
from dpsweep.store.filesystem import check_local, find_filesystem, find_mount

TEXT = r"""sysfs /sys sysfs rw,nosuid,nodev,noexec,relatime 0 0
/dev/nvme0n1p2 / ext4 rw,relatime,errors=remount-ro 0 0
tmpfs /tmp tmpfs rw,nosuid,nodev,size=8123456k 0 0
fileserver:/export/home /home nfs4 rw,relatime,vers=4.2,hard,proto=tcp,addr=10.0.0.2 0 0
/dev/sdb1 /home/local xfs rw,relatime 0 0
//nas/share /mnt/my\040share cifs rw,vers=3.1.1,username=me 0 0
10.0.0.9@tcp:/scratch /scratch lustre rw,flock,lazystatfs 0 0
me@host:/data /mnt/ssh fuse.sshfs rw,nosuid,nodev,user_id=1000 0 0
/dev/sdc1 /mnt/usb fuseblk rw,user_id=0 0 0
portal /run/user/1000/doc fuse.portal rw,user_id=1000 0 0
overlay /var/lib/docker/overlay2/x/merged overlay rw,lowerdir=/a:/b 0 0
autofs /auto autofs rw,fd=7 0 0
server:/auto/x /auto/x nfs rw,vers=3 0 0
/dev/sdd1 /twice ext4 rw 0 0
server:/twice /twice nfs rw 0 0
C:\134 /mnt/c 9p rw,dirsync,aname=drvfs 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind", "shared"),
    [
        ("/var/dpsweep", "ext4", False),
        ("/home/me/.dpsweep", "nfs4", True),
        ("/home/local/x", "xfs", False),
        ("/homework", "ext4", False),
        ("/mnt/my share/x", "cifs", True),
        ("/scratch/me", "lustre", True),
        ("/mnt/ssh", "fuse.sshfs", True),
        ("/mnt/usb/x", "fuseblk", False),
        ("/run/user/1000/doc/x", "fuse.portal", False),
        ("/var/lib/docker/overlay2/x/merged/y", "overlay", False),
        ("/auto/x/y", "nfs", True),
        ("/twice", "nfs", True),
        ("/mnt/c/Users", "9p", True),
        ("/tmp", "tmpfs", False),
    ],
)
def test_the_deepest_and_newest_mount_decides(folder, kind, shared):
    mount = find_mount(Path(folder), TEXT)
    assert (mount.kind, mount.is_shared) == (kind, shared)


@pytest.mark.parametrize(
    "kind", ["gpfs", "beegfs", "ceph", "fuse.glusterfs", "smb3", "afs", "wekafs", "fuse.ceph-fuse"]
)
def test_what_clusters_share_is_known(kind):
    assert find_mount(Path("/x"), f"a /x {kind} rw 0 0").is_shared


def test_a_shared_place_is_refused_with_reason_and_remedy(tmp_path, monkeypatch):
    place = tmp_path.resolve()
    listing = tmp_path / "mounts"
    listing.write_text(f"server:/export {place} nfs4 rw 0 0\n")
    monkeypatch.setattr(mounts, "MOUNTS", listing)
    words = rf"study\.db: the study would be .* on nfs4 \(server:/export at {place}\).* Try this"
    with pytest.raises(StateError, match=words):
        check_local(tmp_path / "not" / "there" / "study.db", "the study", "Try this")
    listing.write_text("/dev/sda / ext4 rw 0 0\n")
    check_local(tmp_path / "study.db", "the study", "Try this")


def test_a_link_is_followed_to_where_the_file_would_lie(tmp_path, monkeypatch):
    far, listing = tmp_path / "far", tmp_path / "mounts"
    far.mkdir()
    (tmp_path / "near").symlink_to(far)
    listing.write_text(f"server:/export {far.resolve()} nfs rw 0 0\n")
    monkeypatch.setattr(mounts, "MOUNTS", listing)
    assert find_filesystem(tmp_path / "near" / "state").is_shared


def test_a_system_that_does_not_say_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "none")
    assert find_filesystem(tmp_path) is None
    check_local(tmp_path / "study.db", "the study", "")
