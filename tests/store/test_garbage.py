"""What nobody needs is found and removed; what a driver, a worker or a reader needs stays."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.store import garbage as trial_dir
from dpsweep.store.garbage import find_leftovers, remove_leftovers
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study
from dpsweep.tracking.spool import Spool
from dpsweep.training.trial_dir import TrialDir

HOLD = """
import sys
from pathlib import Path
from dpsweep.store.lease import hold_lease
with hold_lease(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def state(tmp_path):
    return StateFolder(tmp_path / "state")


@pytest.fixture
def sweep(sweep_file):
    return load_sweep(sweep_file)


@pytest.fixture
def folder(state, sweep, monkeypatch):
    """A sweep with one trial that ended and one that was interrupted."""
    monkeypatch.setattr(trial_dir, "_YOUNG_SECONDS", 0.0)
    made = state.sweep("tiny")
    made.create(sweep.file, sweep.base, None)
    study = Study.create(state.storage_uri, sweep, made.id)
    for _ in range(2):
        place = TrialDir(made.trial_dir(study.ask().number))
        place.make_secret()
        place.save({"x": 1})
    study.tell(0, "failed")
    return made


def kinds(state):
    return sorted(one.kind for one in find_leftovers(state))


def test_looking_at_nothing_finds_and_makes_nothing(state):
    assert find_leftovers(state) == []
    assert not state.root.exists()


def test_resume_state_goes_with_its_trial_and_not_before(state, folder):
    (one,) = find_leftovers(state)
    assert (one.kind, one.sweep.name) == ("resume state of an ended trial", "tiny")
    ended, interrupted = folder.trial_dir(0), folder.trial_dir(1)
    assert one.size_bytes == sum(f.stat().st_size for f in ended.iterdir())
    assert remove_leftovers([one]) == [one]
    assert list(ended.iterdir()) == []
    assert {f.name for f in interrupted.iterdir()} == {"secret", "checkpoint.pt"}
    assert find_leftovers(state) == []


def test_files_of_killed_writers_are_known_by_their_names(state, folder):
    TrialDir(folder.trial_dir(0)).forget()
    place = folder.trial_dir(1)
    for name in (".checkpoint.pt.ab1_cd2e", ".weights.pt.00000000"):
        (place / name).write_bytes(b"x" * 100)
    (folder.path / ".lease.abcdefgh").write_text("")
    for name in (".checkpoint.pt", ".notes.abcdefgh", "checkpoint.pt.abcdefgh"):
        (place / name).write_text("somebody's own")
    assert kinds(state) == ["file of a killed writer"] * 3
    assert len(remove_leftovers(find_leftovers(state))) == 3
    assert find_leftovers(state) == []
    assert len(list(place.iterdir())) == 5


def test_rays_folder_and_a_delivered_spool_can_go(state, folder):
    TrialDir(folder.trial_dir(0)).forget()
    (folder.path / "ray" / "deep").mkdir(parents=True)
    (folder.path / "ray" / "deep" / "file").write_bytes(b"x" * 1000)
    spool = Spool(folder.path)
    spool.append({"n": 1})
    assert kinds(state) == ["Ray's folder"], "what waits in the spool stays"
    spool.mark_delivered(spool.waiting()[1])
    found = {one.kind: one for one in find_leftovers(state)}
    assert set(found) == {"Ray's folder", "delivered spool"}
    assert found["Ray's folder"].size_bytes == 1000
    remove_leftovers(list(found.values()))
    assert find_leftovers(state) == []
    assert spool.is_empty()


def test_a_sweep_that_is_driven_is_not_touched(state, folder):
    found = find_leftovers(state)
    driver = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout.readline() == "held\n"
    assert find_leftovers(state) == []
    assert remove_leftovers(found) == [], "it was found before its driver came"
    assert (folder.trial_dir(0) / "secret").exists()
    driver.communicate()
    assert remove_leftovers(found) == found


def test_a_worker_that_outlived_its_driver_keeps_its_room(state, folder):
    with TrialDir(folder.trial_dir(0)).lock():
        assert find_leftovers(state) == []
    assert len(find_leftovers(state)) == 1


def test_a_study_without_a_folder_and_a_folder_without_a_study(state, folder, sweep):
    Study.create(state.storage_uri, sweep_named(sweep, "gone"))
    state.sweep("half").create(sweep_named(sweep, "half").file, sweep.base, None)
    (state.root / "sweeps" / "empty").mkdir()
    TrialDir(folder.trial_dir(0)).forget()
    found = find_leftovers(state)
    assert [(one.kind, one.place.split("/")[-1]) for one in found] == [
        ("folder without a study", "empty"),
        ("folder without a study", "half"),
        ("study without a folder", "study.db"),
    ]
    assert remove_leftovers(found) == found
    assert find_leftovers(state) == []
    assert state.names() == ["tiny"]
    assert len(Study.open(state.storage_uri, sweep, folder.id).running()) == 1


def test_a_folder_with_results_stays_though_its_study_is_gone(state, folder):
    TrialDir(folder.trial_dir(1)).save_rows([{"epoch": 1}])
    for file in state.root.glob("study.db*"):
        file.unlink()
    assert find_leftovers(state) == []
    (folder.trial_dir(1) / "metrics.json").unlink()
    assert kinds(state) == ["folder without a study"]
    assert not (state.root / "study.db").exists()


def test_a_launch_that_has_just_begun_is_left_alone(state, folder, sweep, monkeypatch):
    monkeypatch.setattr(trial_dir, "_YOUNG_SECONDS", 60.0)
    TrialDir(folder.trial_dir(0)).forget()
    state.sweep("half").create(sweep_named(sweep, "half").file, sweep.base, None)
    assert find_leftovers(state) == []
    os.utime(state.sweep("half").path, (1, 1))
    assert kinds(state) == ["folder without a study"]


def test_a_storage_that_is_away_condemns_nothing(state, folder, sweep):
    away = state.sweep("away")
    away.create(sweep_named(sweep, "away").file, sweep.base, None, "mysql+nodriver://h/db")
    TrialDir(folder.trial_dir(0)).forget()
    assert find_leftovers(state) == []


def sweep_named(sweep, name):
    config = sweep.config.model_copy(update={"name": name})
    file = replace(sweep.file, tree={**sweep.file.tree, "name": name})
    return replace(sweep, config=config, file=file)
