"""A trial directory keeps private files whole or not at all, until they are to be deleted."""

import errno
import os
import stat
import subprocess
import threading

import pytest
import torch

from dpsweep.core.errors import DiskFull, StateError
from dpsweep.core.seeds import SECRET_BYTES
from dpsweep.training.trial_dir import TrialDir, delete_weights_except

ROWS = [{"epoch": 1, "step": 3, "valid/accuracy": 0.5}]
STATE = {"progress": {"step": 3, "iterates": [{"w": torch.arange(3.0)}]}, "rows": ROWS}


@pytest.fixture
def trial_dir(tmp_path, monkeypatch):
    monkeypatch.delenv("DPSWEEP_TEST_SECRET", raising=False)
    before = os.umask(0)  # so that a mode left to the system would be open to all
    yield TrialDir(tmp_path / "sweep" / "trial-7")
    os.umask(before)


def mode(place) -> int:
    return stat.S_IMODE(place.stat().st_mode)


def test_folder_and_files_are_their_owners_alone(trial_dir):
    trial_dir.make_secret()
    trial_dir.save(STATE)
    trial_dir.save_rows(ROWS)
    trial_dir.save_weights({"w": torch.ones(2)})
    trial_dir.note_failure("Traceback ...")
    assert mode(trial_dir.path) == 0o700
    assert {place.name: oct(mode(place)) for place in trial_dir.path.iterdir()} == dict.fromkeys(
        ["secret", "checkpoint.pt", "metrics.json", "weights.pt", "error.txt"], "0o600"
    )


def test_secret_is_drawn_once_and_survives_in_the_folder(trial_dir):
    trial_dir.make_secret()
    first = trial_dir.secret()
    trial_dir.make_secret()
    assert len(first.key) == SECRET_BYTES
    assert not first.void
    assert TrialDir(trial_dir.path).secret() == first
    other = TrialDir(trial_dir.path.with_name("trial-8"))
    other.make_secret()
    assert other.secret() != first


def test_nobody_but_whoever_starts_the_trial_draws_its_secret(trial_dir):
    with pytest.raises(StateError, match=r"secret is not there\. Starting over with fresh noise"):
        trial_dir.secret()


def test_a_secret_that_was_lost_after_a_report_is_not_drawn_again(trial_dir):
    trial_dir.make_secret()
    trial_dir.save_rows(ROWS)
    trial_dir.forget()
    with pytest.raises(StateError, match="reports were made here with a secret that is gone"):
        trial_dir.make_secret()


def test_many_who_start_at_once_share_one_secret(trial_dir):
    barrier = threading.Barrier(8)
    seen = []

    def start():
        barrier.wait()
        trial_dir.make_secret()
        seen.append(trial_dir.secret())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len({secret.key for secret in seen}) == 1


def test_a_room_is_held_by_one_process(trial_dir):
    with (
        trial_dir.lock(),
        pytest.raises(StateError, match="another process trains here"),
        TrialDir(trial_dir.path).lock(),
    ):
        pass
    with trial_dir.lock():
        pass


def test_secret_is_kept_when_the_environment_names_a_test_secret_later(trial_dir, monkeypatch):
    trial_dir.make_secret()
    drawn = trial_dir.secret()
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "later")
    assert trial_dir.secret() == drawn


def test_fixed_secret_stays_void_where_the_variable_is_gone(trial_dir, monkeypatch):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "now")
    trial_dir.make_secret()
    fixed = trial_dir.secret()
    monkeypatch.delenv("DPSWEEP_TEST_SECRET")
    assert fixed.void
    assert trial_dir.secret() == fixed


def test_room_is_void_only_with_a_fixed_secret(trial_dir, monkeypatch):
    assert not trial_dir.is_void
    trial_dir.make_secret()
    assert not trial_dir.is_void
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "now")
    other = TrialDir(trial_dir.path.with_name("trial-8"))
    other.make_secret()
    assert other.is_void


def test_checkpoint_comes_back_as_it_was_saved(trial_dir):
    assert trial_dir.load() is None
    trial_dir.save(STATE)
    loaded = TrialDir(trial_dir.path).load()
    assert loaded["rows"] == ROWS
    assert torch.equal(loaded["progress"]["iterates"][0]["w"], torch.arange(3.0))


def test_rows_come_back_as_they_were_saved(trial_dir):
    assert trial_dir.rows() == []
    trial_dir.save_rows(ROWS)
    assert TrialDir(trial_dir.path).rows() == ROWS


def test_weights_are_stored_without_the_trial_around_them(trial_dir):
    base = torch.zeros(1000)
    trial_dir.save_weights({"w": base[:2].requires_grad_()})
    loaded = torch.load(trial_dir.weights, weights_only=True)
    assert torch.equal(loaded["w"], torch.zeros(2))
    assert loaded["w"].untyped_storage().nbytes() == 8
    assert not loaded["w"].requires_grad


def test_save_that_breaks_off_leaves_the_last_checkpoint_and_no_debris(trial_dir):
    trial_dir.save(STATE)
    with pytest.raises(Exception, match=r"(?i)pickle"):
        trial_dir.save({"w": torch.ones(1000), "cannot be saved": lambda: None})
    assert [place.name for place in trial_dir.path.iterdir()] == ["checkpoint.pt"]
    assert trial_dir.load()["rows"] == ROWS


def test_forgetting_leaves_results_and_takes_secret_and_checkpoint(trial_dir):
    trial_dir.make_secret()
    trial_dir.save(STATE)
    trial_dir.save_rows(ROWS)
    trial_dir.save_weights({"w": torch.ones(2)})
    trial_dir.forget()
    assert {place.name for place in trial_dir.path.iterdir()} == {"metrics.json", "weights.pt"}
    trial_dir.forget()  # a second time is no error


def test_failures_note_says_where_it_lies(trial_dir):
    place = trial_dir.note_failure("Traceback ...")
    assert place.parent == trial_dir.path
    assert place.read_text() == "Traceback ..."


def test_place_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"file/trial: cannot be written: .* --state or -o"):
        TrialDir(tmp_path / "file" / "trial")


@pytest.fixture
def small_disk(tmp_path):
    """A real file system with trial_dir for about 200 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(small_disk):
    trial_dir = TrialDir(small_disk / "trial")
    trial_dir.save(STATE)
    words = (
        rf"{trial_dir.path}: the disk is full: .*B are free\. Nothing .* is lost.*dpsweep resume"
    )
    with pytest.raises(DiskFull, match=words):
        trial_dir.save({"w": torch.ones(100_000)})
    assert trial_dir.load()["rows"] == ROWS
    assert [place.name for place in trial_dir.path.iterdir()] == ["checkpoint.pt"]
    trial_dir.save_rows(ROWS)  # there is trial_dir for what is small


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_when_syncing_leaves_the_last_checkpoint(trial_dir, monkeypatch, code):
    def full(_):
        raise OSError(code, os.strerror(code))

    trial_dir.save(STATE)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskFull, match="the disk is full"):
        trial_dir.save({"w": torch.zeros(1)})
    with pytest.raises(DiskFull, match="the disk is full"):
        trial_dir.make_secret()
    monkeypatch.undo()
    assert trial_dir.load()["rows"] == ROWS
    assert [place.name for place in trial_dir.path.iterdir()] == ["checkpoint.pt"]


def test_another_error_of_the_disk_is_not_called_full(trial_dir, monkeypatch):
    def broken(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        trial_dir.save(STATE)


def test_only_the_best_weights_are_kept_and_no_unfinished_trials_are_taken(tmp_path):
    trial_dirs = [TrialDir(tmp_path / f"{number:04d}") for number in range(4)]
    trial_dirs[2].make_secret()
    for one in trial_dirs:
        one.save_weights({"w": torch.ones(10)})
        one.save_rows(ROWS)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "weights.pt").write_text("somebody's own")
    size = trial_dirs[0].weights.stat().st_size
    assert delete_weights_except(tmp_path, [1]) == 2 * size
    assert [one.weights.exists() for one in trial_dirs] == [False, True, True, False]
    assert all(one.rows() == ROWS for one in trial_dirs)
    assert (tmp_path / "notes" / "weights.pt").exists()
    assert delete_weights_except(tmp_path, [1]) == 0


@pytest.mark.parametrize("stored", [b"", b"\x00", b"\x00" * 32, b"\x02" + b"k" * 32])
def test_a_secret_that_is_cut_short_makes_no_noise(trial_dir, stored):
    """One byte was a secret with an empty key: anybody could draw its noise."""
    (trial_dir.path / "secret").write_bytes(stored)
    assert not trial_dir.is_void
    with pytest.raises(StateError, match=r"secret: is damaged: it has \d+ bytes in place of 33"):
        trial_dir.secret()
