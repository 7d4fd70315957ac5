"""A sweep's folder has one owner, private modes, and nothing before it is launched."""

import os
import stat
import subprocess
import sys

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import StateError
from dpsweep.store.state_dir import StateFolder

HOLD = """
import sys
from pathlib import Path
from dpsweep.store.state_dir import StateFolder
with StateFolder(Path(sys.argv[1])).sweep("tiny").lease():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def state(tmp_path):
    return StateFolder(tmp_path / "state")


@pytest.fixture
def folder(state, sweep_file):
    sweep = load_sweep(sweep_file)
    made = state.sweep("tiny")
    made.create(sweep.file, sweep.base, "http://me:secret@host:5000")
    return made


def test_looking_creates_nothing(state):
    state.check_writable()
    assert state.names() == []
    with pytest.raises(StateError, match=r"no sweep called 'x' in .*Known: none"):
        state.sweep("x").read_files()
    assert not state.root.exists()


def test_what_is_stored_is_what_was_launched_and_only_the_owner_can_read_it(folder, sweep_file):
    file, base = folder.read_files()
    sweep = load_sweep(sweep_file)
    assert (file.tree, base.tree) == (sweep.file.tree, sweep.base.tree)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "sweep.json").stat().st_mode) == 0o600
    assert "secret" not in (folder.path / "sweep.yaml").read_text()
    assert load_sweep(folder.path / "sweep.yaml").reference_trial == sweep.reference_trial


def test_a_taken_name_says_how_to_go_on(folder, sweep_file):
    sweep = load_sweep(sweep_file)
    with pytest.raises(StateError, match=r"'tiny' is already in .*dpsweep resume tiny.*--name"):
        folder.create(sweep.file, sweep.base, None)


def test_a_second_driver_is_refused_and_a_dead_ones_lease_is_free(state, folder):
    driver = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout.readline() == "held\n"
    assert folder.owner().pid == driver.pid
    with (
        pytest.raises(StateError, match=rf"is being driven by process {driver.pid} on"),
        folder.lease(),
    ):
        pass
    driver.kill()
    driver.wait()
    driver.stdin.close()
    driver.stdout.close()
    assert folder.owner() is None
    with folder.lease():
        assert folder.owner().pid == os.getpid()


def test_an_unwritable_place_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"--state .*file is not a folder"):
        StateFolder(tmp_path / "file" / "state").check_writable()
