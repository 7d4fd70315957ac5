"""A cluster's folder of temporary files is used again only if it is still ours alone."""

import os
import pwd
import tempfile

import pytest

from dpsweep.cluster.local import Local, belongs_to
from dpsweep.cluster.services import check_installed, postgres
from dpsweep.core.errors import DpSweepError


def other_mode(place):
    place.chmod(0o711)


def link(place):
    real = place.rename(place.with_name("real"))
    place.symlink_to(real)


def gone(place):
    place.rmdir()


def file(place):
    place.rmdir()
    place.touch(0o700)


@pytest.mark.parametrize("change", [other_mode, link, gone, file])
def test_a_folder_that_is_not_ours_alone_any_more_is_left(tmp_path, monkeypatch, change):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    local = Local(tmp_path / "local")
    local.prepare(1)
    first = local.runtime
    local.prepare(1)
    assert local.runtime == first
    change(tmp_path / os.path.basename(first))
    again = Local.at(local.folder)
    again.prepare(1)
    assert again.runtime != first
    assert belongs_to(os.geteuid(), again.runtime)
    assert not belongs_to(os.geteuid() + 1, again.runtime)


@pytest.mark.slow
def test_postgresql_opens_nobodys_folder_but_its_own(local):
    try:
        check_installed()
    except DpSweepError as e:
        pytest.skip(str(e))
    local.prepare(1)
    user = os.geteuid() or pwd.getpwnam("nobody").pw_uid
    for _ in range(2):
        local.ports["postgres"] = local.ports["gcs"]
        postgres(local, "hunter2")
        assert belongs_to(os.geteuid(), local.runtime)
        home = Local.at(local.folder).database or local.folder / "postgres"
        assert belongs_to(user, str(home))
        local.down()
        assert os.path.exists(os.path.join(home, "ready"))
    local.remove()
    assert not os.path.exists(home)
