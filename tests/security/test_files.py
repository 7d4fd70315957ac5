"""Nothing that is read runs code, what is private stays so, and no URL shows a password."""

import os
import pickle
import stat
import subprocess
import sys

import pytest
import torch

from dpsweep.cluster import connect
from dpsweep.config.sweep import load_sweep
from dpsweep.core import cache
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.data import shared
from dpsweep.models import transfer
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.storage import resolve_storage_uri
from dpsweep.training.trial_dir import TrialDir


class Bomb:
    """Pickled, it makes a file wherever it is loaded."""

    def __init__(self, place):
        self.place = str(place)

    def __reduce__(self):
        return open, (self.place, "w")


@pytest.fixture
def bomb(tmp_path):
    """Writes a malicious file of torch.save's, and says afterwards whether it went off."""
    went = tmp_path / "owned"

    def write(place):
        torch.save({"params": Bomb(went)}, place)
        with open(place, "rb") as file:
            assert file.read(2) == b"PK"

    yield write
    assert not went.exists(), "code ran"


def test_the_bomb_goes_off_where_it_is_let(tmp_path):
    """Otherwise the tests below could not fail."""
    torch.save({"params": Bomb(tmp_path / "owned")}, tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt", weights_only=False)["params"].close()
    assert (tmp_path / "owned").exists()


def test_a_checkpoint_runs_no_code(tmp_path, bomb):
    trial_dir = TrialDir(tmp_path / "trial_dir")
    bomb(trial_dir.path / "checkpoint.pt")
    with pytest.raises(pickle.UnpicklingError):
        trial_dir.load()


def test_a_copy_of_data_runs_no_code(tmp_path, bomb, monkeypatch):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "data"
    source.mkdir()
    shared.load_shared(source, lambda: torch.zeros(2))
    (copy,) = (tmp_path / "cache").glob("*.pt")
    bomb(copy)
    with pytest.raises(pickle.UnpicklingError):
        shared.load_shared(source, lambda: torch.zeros(2))


def test_weights_of_a_model_run_no_code(tmp_path, bomb):
    bomb(tmp_path / "w.pt")
    with pytest.raises(InvalidKey, match=r"w\.pt: holds more than plain tensors"):
        transfer._read_weights(str(tmp_path / "w.pt"))


def test_no_other_place_loads_a_pickle():
    """Every torch.load in the package says weights_only, and nothing else unpickles."""
    package = os.path.dirname(connect.__file__) + "/.."
    lines = subprocess.run(
        [
            "grep",
            "-rnE",
            r"torch\.load\(|pickle\.load|np\.load\(|joblib|yaml\.(unsafe|full)_",
            package,
        ],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    lines = [line for line in lines if ".py:" in line]
    assert lines
    safe = ("weights_only=True", "allow_pickle=False")
    assert [line for line in lines if not any(word in line for word in safe)] == []


def test_private_files_are_private_under_any_umask(tmp_path, sweep_file):
    before = os.umask(0)
    try:
        sweep, state = load_sweep(sweep_file), StateFolder(tmp_path / "deep/er/state")
        folder = state.sweep("tiny")
        folder.create(sweep.file, sweep.base, None)
        with folder.lease():
            trial_dir = TrialDir(folder.trial_dir(0))
            trial_dir.make_secret()
            trial_dir.save({"x": 1})
            trial_dir.note_failure("quotes data")
    finally:
        os.umask(before)
    open_ = [
        place
        for place in [state.root, *state.root.rglob("*")]
        if stat.S_IMODE(place.stat().st_mode) & 0o077
        and place.name not in ("owner", "sweep.yaml", "lock")
    ]
    assert open_ == []
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o700


def test_links_in_the_folder_for_temporary_files_lead_nowhere(tmp_path, monkeypatch):
    target = tmp_path / "home"
    target.mkdir()
    (target / "thesis").write_text("years of work")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    dead = 4_194_303
    (temporary / f"dpsweep-ray-{dead}-x").symlink_to(target)
    assert list(connect.orphans()) == []
    (temporary / f"dpsweep-ray-{dead}-y").mkdir()
    (temporary / f"dpsweep-ray-{dead}-y/z").symlink_to(target)
    connect._remove_orphans()
    assert (target / "thesis").exists()
    assert not (temporary / f"dpsweep-ray-{dead}-y").exists()

    monkeypatch.delenv("DPSWEEP_CACHE", raising=False)
    (temporary / f"dpsweep-data-{os.getuid()}").symlink_to(target)
    with pytest.raises(Exception, match="others can reach it"):
        cache.cache_folder()


URLS = [
    ("--storage", "postgresql://me:pa55@h/db"),
    ("--storage", "postgresql://me@h/db?password=pa55"),
    ("--tracking-uri", "http://me:pa55@127.0.0.1:9"),
    ("--tracking-uri", "https://h/?token=pa55"),
    ("--tracking-uri", "postgresql://me:pa55@h/db"),
]


@pytest.mark.parametrize(("option", "url"), URLS, ids=range(len(URLS)))
def test_a_password_in_an_option_is_refused_and_not_repeated(
    tmp_path, sweep_file, monkeypatch, capfd, option, url
):
    from dpsweep.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPSWEEP_STORAGE", raising=False)
    monkeypatch.setattr(sys, "argv", ["dpsweep", "launch", "tiny.yaml", option, url])
    with pytest.raises(SystemExit) as end:
        main()
    said = capfd.readouterr()
    assert end.value.code == 2
    assert f"error: {option} " in said.err
    assert "has a password in it" in said.err
    assert "pa55" not in said.err + said.out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.yaml"]


def test_a_password_in_the_environment_is_taken(monkeypatch):
    monkeypatch.setenv("DPSWEEP_STORAGE", "postgresql://me:pa55@h/db")
    assert resolve_storage_uri(None) == "postgresql+psycopg://me:pa55@h/db"
    with pytest.raises(ConfigError, match="PGPASSWORD"):
        resolve_storage_uri("postgresql://me:pa55@h/db")
