"""`gc` shows what can go, and deletes it only if asked to."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dpsweep.cli import app
from dpsweep.config.sweep import load_sweep
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study


@pytest.fixture
def state(tmp_path, sweep_file, monkeypatch):
    """A state folder with one sweep, and a temporary folder of our own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made, sweep = StateFolder(tmp_path / ".dpsweep"), load_sweep(sweep_file)
    folder = made.sweep("tiny")
    folder.create(sweep.file, sweep.base, None)
    Study.create(made.storage_uri, sweep, folder.id)
    return made


def gc(*args):
    result = CliRunner().invoke(app, ["gc", *args])
    assert result.exit_code == 0, result.exception
    return result.output


def test_leftovers_are_listed_with_sizes_and_deleted_on_demand(state, tmp_path):
    assert "nothing is left over" in gc()
    (state.sweep("tiny").path / "ray").mkdir()
    (state.sweep("tiny").path / "ray/file").write_bytes(b"x" * 2000)
    shown = gc()
    assert "2.0 kB" in shown
    assert "Ray's folder" in shown
    assert "Delete it with: dpsweep gc --remove" in shown
    (row,) = json.loads(gc("--json"))
    assert row == {
        "kind": "Ray's folder",
        "place": str(state.sweep("tiny").path / "ray"),
        "bytes": 2000,
        "sweep": "tiny",
        "removed": False,
    }
    assert json.loads(gc("--json", "--remove"))[0]["removed"]
    assert "nothing is left over" in gc()


def test_clusters_of_dead_drivers_go_and_those_of_living_ones_stay(state, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getpid()):
        (tmp_path / f"dpsweep-ray-{pid}-x").mkdir()
    assert "cluster of a dead driver" in gc("--remove")
    assert not (tmp_path / f"dpsweep-ray-{dead.pid}-x").exists()
    assert (tmp_path / f"dpsweep-ray-{os.getpid()}-x").exists()
