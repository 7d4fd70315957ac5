"""A room keeps what is private to its owner, whole or not at all, until it is to be forgotten."""

import errno
import os
import stat
import subprocess
import threading

import pytest
import torch

from dpsweep.core.errors import DiskFull, StateError
from dpsweep.core.seeds import SECRET_BYTES
from dpsweep.training.trial_dir import Room, keep_weights

ROWS = [{"epoch": 1, "step": 3, "valid/accuracy": 0.5}]
STATE = {"progress": {"step": 3, "trail": [{"w": torch.arange(3.0)}]}, "rows": ROWS}


@pytest.fixture
def room(tmp_path, monkeypatch):
    monkeypatch.delenv("DPSWEEP_TEST_SECRET", raising=False)
    before = os.umask(0)  # so that a mode left to the system would be open to all
    yield Room(tmp_path / "sweep" / "trial-7")
    os.umask(before)


def mode(place) -> int:
    return stat.S_IMODE(place.stat().st_mode)


def test_folder_and_files_are_their_owners_alone(room):
    room.make_secret()
    room.save(STATE)
    room.save_rows(ROWS)
    room.save_weights({"w": torch.ones(2)})
    room.note_failure("Traceback ...")
    assert mode(room.path) == 0o700
    assert {place.name: oct(mode(place)) for place in room.path.iterdir()} == dict.fromkeys(
        ["secret", "checkpoint.pt", "metrics.json", "weights.pt", "error.txt"], "0o600"
    )


def test_secret_is_drawn_once_and_survives_in_the_folder(room):
    room.make_secret()
    first = room.secret()
    room.make_secret()
    assert len(first.key) == SECRET_BYTES
    assert not first.void
    assert Room(room.path).secret() == first
    other = Room(room.path.with_name("trial-8"))
    other.make_secret()
    assert other.secret() != first


def test_nobody_but_whoever_starts_the_trial_draws_its_secret(room):
    with pytest.raises(StateError, match=r"secret is not there\. Starting over with fresh noise"):
        room.secret()


def test_a_secret_that_was_lost_after_a_report_is_not_drawn_again(room):
    room.make_secret()
    room.save_rows(ROWS)
    room.forget()
    with pytest.raises(StateError, match="reports were made here with a secret that is gone"):
        room.make_secret()


def test_many_who_start_at_once_share_one_secret(room):
    barrier = threading.Barrier(8)
    seen = []

    def start():
        barrier.wait()
        room.make_secret()
        seen.append(room.secret())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len({secret.key for secret in seen}) == 1


def test_a_room_is_held_by_one_process(room):
    with (
        room.lock(),
        pytest.raises(StateError, match="another process trains here"),
        Room(room.path).lock(),
    ):
        pass
    with room.lock():
        pass


def test_secret_is_kept_when_the_environment_names_a_test_secret_later(room, monkeypatch):
    room.make_secret()
    drawn = room.secret()
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "later")
    assert room.secret() == drawn


def test_fixed_secret_stays_void_where_the_variable_is_gone(room, monkeypatch):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "now")
    room.make_secret()
    fixed = room.secret()
    monkeypatch.delenv("DPSWEEP_TEST_SECRET")
    assert fixed.void
    assert room.secret() == fixed


def test_room_is_void_only_with_a_fixed_secret(room, monkeypatch):
    assert not room.is_void
    room.make_secret()
    assert not room.is_void
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "now")
    other = Room(room.path.with_name("trial-8"))
    other.make_secret()
    assert other.is_void


def test_checkpoint_comes_back_as_it_was_saved(room):
    assert room.load() is None
    room.save(STATE)
    loaded = Room(room.path).load()
    assert loaded["rows"] == ROWS
    assert torch.equal(loaded["progress"]["trail"][0]["w"], torch.arange(3.0))


def test_rows_come_back_as_they_were_saved(room):
    assert room.rows() == []
    room.save_rows(ROWS)
    assert Room(room.path).rows() == ROWS


def test_weights_are_stored_without_the_trial_around_them(room):
    base = torch.zeros(1000)
    room.save_weights({"w": base[:2].requires_grad_()})
    loaded = torch.load(room.weights, weights_only=True)
    assert torch.equal(loaded["w"], torch.zeros(2))
    assert loaded["w"].untyped_storage().nbytes() == 8
    assert not loaded["w"].requires_grad


def test_save_that_breaks_off_leaves_the_last_checkpoint_and_no_debris(room):
    room.save(STATE)
    with pytest.raises(Exception, match=r"(?i)pickle"):
        room.save({"w": torch.ones(1000), "cannot be saved": lambda: None})
    assert [place.name for place in room.path.iterdir()] == ["checkpoint.pt"]
    assert room.load()["rows"] == ROWS


def test_forgetting_leaves_results_and_takes_secret_and_checkpoint(room):
    room.make_secret()
    room.save(STATE)
    room.save_rows(ROWS)
    room.save_weights({"w": torch.ones(2)})
    room.forget()
    assert {place.name for place in room.path.iterdir()} == {"metrics.json", "weights.pt"}
    room.forget()  # a second time is no error


def test_failures_note_says_where_it_lies(room):
    place = room.note_failure("Traceback ...")
    assert place.parent == room.path
    assert place.read_text() == "Traceback ..."


def test_place_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"file/trial: cannot be written: .* --state or -o"):
        Room(tmp_path / "file" / "trial")


@pytest.fixture
def small_disk(tmp_path):
    """A real file system with room for about 200 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(small_disk):
    room = Room(small_disk / "trial")
    room.save(STATE)
    words = rf"{room.path}: the disk is full: .*B are free\. Nothing .* is lost.*dpsweep resume"
    with pytest.raises(DiskFull, match=words):
        room.save({"w": torch.ones(100_000)})
    assert room.load()["rows"] == ROWS
    assert [place.name for place in room.path.iterdir()] == ["checkpoint.pt"]
    room.save_rows(ROWS)  # there is room for what is small


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_when_syncing_leaves_the_last_checkpoint(room, monkeypatch, code):
    def full(_):
        raise OSError(code, os.strerror(code))

    room.save(STATE)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskFull, match="the disk is full"):
        room.save({"w": torch.zeros(1)})
    with pytest.raises(DiskFull, match="the disk is full"):
        room.make_secret()
    monkeypatch.undo()
    assert room.load()["rows"] == ROWS
    assert [place.name for place in room.path.iterdir()] == ["checkpoint.pt"]


def test_another_error_of_the_disk_is_not_called_full(room, monkeypatch):
    def broken(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        room.save(STATE)


def test_only_the_best_weights_are_kept_and_no_unfinished_trials_are_taken(tmp_path):
    rooms = [Room(tmp_path / f"{number:04d}") for number in range(4)]
    rooms[2].make_secret()
    for one in rooms:
        one.save_weights({"w": torch.ones(10)})
        one.save_rows(ROWS)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "weights.pt").write_text("somebody's own")
    size = rooms[0].weights.stat().st_size
    assert keep_weights(tmp_path, [1]) == 2 * size
    assert [one.weights.exists() for one in rooms] == [False, True, True, False]
    assert all(one.rows() == ROWS for one in rooms)
    assert (tmp_path / "notes" / "weights.pt").exists()
    assert keep_weights(tmp_path, [1]) == 0
