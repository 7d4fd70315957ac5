"""A study's storage is set up, checked and kept apart from others'; errors say what to do."""

import sqlite3
from contextlib import closing

import pytest
import sqlalchemy

from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError, ConnectionRefused, DiskFull, StateError
from dpsweep.store import storage
from dpsweep.store.study import Study


@pytest.fixture
def uri(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def sweep(sweep_file):
    return load_sweep(sweep_file)


def test_every_connection_writes_ahead_and_syncs_each_commit(uri):
    made = storage.open_storage(uri)
    for connection in (made.engine.connect(), made.engine.connect()):
        with connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
    other = sqlalchemy.create_engine("sqlite://")
    with other.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "memory"


def test_a_reader_does_not_hold_up_the_driver(uri, sweep):
    study = Study.create(uri, sweep)
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM studies").fetchall()
        study.ask()  # would wait for a minute, and fail


def test_a_full_disk_says_where_and_loses_nothing(uri, sweep, tmp_path):
    study = Study.create(uri, sweep)
    asked = study.ask()

    def full(connection, record):
        connection.execute(f"PRAGMA max_page_count = {pages}")

    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as file:
        pages = file.execute("PRAGMA page_count").fetchone()[0]
    engine = study._study._storage._backend.engine
    engine.dispose()
    sqlalchemy.event.listen(engine, "connect", full)
    with pytest.raises(DiskFull, match=rf"{tmp_path}: the disk is full: .* are free.*resume"):
        list(iter(study.ask, None))  # until it breaks off
    assert Study.open(uri, sweep).record(asked.number).hyperparams == asked.hyperparams


def test_a_storage_of_a_newer_version_is_refused(uri):
    storage.open_storage(uri)
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as file:
        file.execute("UPDATE alembic_version SET version_num = 'v99.0.0.a'")
        file.commit()
    with pytest.raises(StateError, match=r"made by a newer Optuna than .*pip install -U optuna"):
        storage.open_storage(uri)


def test_a_storage_of_an_older_version_says_how_to_upgrade_it(uri):
    made = storage.open_storage(uri)
    old = made.get_all_versions()[-1]
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as file:
        file.execute("UPDATE alembic_version SET version_num = ?", (old,))
        file.commit()
    with pytest.raises(StateError, match=r"an older Optuna .*optuna storage upgrade"):
        storage.open_storage(uri)


def test_a_study_of_another_state_folder_is_not_gone_on_with(uri, sweep):
    Study.create(uri, sweep, "one").ask()
    assert Study.open(uri, sweep, "one").num_asked() == 1
    with pytest.raises(StateError, match="'tiny' belongs to a sweep of another state folder"):
        Study.open(uri, sweep, "two")


def test_a_name_that_another_folder_took_is_refused_before_anything_is_made(uri, sweep):
    storage.check_storage(uri, "tiny")
    Study.create(uri, sweep, "one")
    with pytest.raises(StateError, match=r"already has a study called 'tiny' .*--name tiny-2"):
        storage.check_storage(uri, "tiny")
    storage.check_storage(uri, "other")


def test_a_study_whose_driver_died_before_it_was_marked_is_adopted(uri, sweep):
    Study.create(uri, sweep)
    Study.open(uri, sweep, "one")
    with pytest.raises(StateError, match="another state folder"):
        Study.open(uri, sweep, "two")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("postgres://me:pw@h/db", "postgresql+psycopg://me:pw@h/db"),
        ("postgresql://h/db", "postgresql+psycopg://h/db"),
        ("postgresql+psycopg2://h/db", "postgresql+psycopg2://h/db"),
        ("mysql+pymysql://h/db", "mysql+pymysql://h/db"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
    ],
)
def test_a_url_is_completed(given, meant):
    assert storage.complete_uri(given) == meant


def test_a_files_path_holds_wherever_later_verbs_are_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage.complete_uri("sqlite:///x.db") == f"sqlite:///{tmp_path}/x.db"


def test_the_option_counts_before_the_variable(monkeypatch):
    assert storage.resolve_storage_uri(None) is None
    monkeypatch.setenv("DPSWEEP_STORAGE", "postgresql+psycopg://variable/db")
    assert storage.resolve_storage_uri(None) == "postgresql+psycopg://variable/db"
    assert (
        storage.resolve_storage_uri("postgresql+psycopg://option/db")
        == "postgresql+psycopg://option/db"
    )


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("no url", "is no database URL. Expected postgresql://"),
        ("redis://:secret@h/0", r"redis://:\*\*\*@h/0: a study is kept in postgresql, mysql"),
    ],
)
def test_what_cannot_hold_a_study_is_refused(uri, message):
    with pytest.raises(ConfigError, match=message):
        storage.complete_uri(uri)


def test_a_missing_driver_is_named_with_its_package():
    words = r"mysql\+nodriver://me:\*\*\*@h/db: needs the driver nodriver.*pip install 'nodriver'"
    with pytest.raises(ConfigError, match=words):
        storage.open_storage("mysql+nodriver://me:secret@h/db")


def test_the_postgres_extra_is_named_where_its_driver_is_missing(monkeypatch):
    monkeypatch.setattr(storage, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'psycopg\[binary\]'"):
        storage.check_storage(storage.complete_uri("postgresql://h/db"))


def test_a_file_in_no_folder_is_refused_with_what_to_check():
    with pytest.raises(ConnectionRefused, match=r"unable to open .*\. Check that its folder is"):
        storage.check_storage("sqlite:////no/such/folder/study.db")


def test_a_database_that_does_not_answer_is_named_without_its_password():
    pytest.importorskip("psycopg")
    with pytest.raises(ConnectionRefused, match=r"does not answer: .*~/\.pgpass") as refused:
        storage.check_storage("postgresql+psycopg://me:secret@127.0.0.1:9/db")
    assert "secret" not in str(refused.value)
