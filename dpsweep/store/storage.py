"""Opens the database that holds a study: a file in the state folder, or a server.

SQLite writes ahead (WAL) and syncs each commit (FULL): what the study was told survives a loss of
power, and a reader never holds up the driver. The settings are made on the engine opened here.

A URL is shown without its password, and is in nobody's argv but the user's own.
"""

import contextlib
import logging
import os
import sqlite3
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.engine.interfaces import ExceptionContext
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.orm import Session, scoped_session

from dpsweep.core.disk import disk_full_error
from dpsweep.core.errors import ConfigError, ConnectionRefused, DiskFull, StateError
from dpsweep.core.sqlite import use_write_ahead_log
from dpsweep.store.retry import retry_connections
from dpsweep.tracking.server import add_driver, redact_password, refuse_password

VARIABLE = "DPSWEEP_STORAGE"
FOLDER = "dpsweep.folder"
"""User attribute of a study: the id of the sweep's folder it belongs to."""

OWNER = "dpsweep.owner"
"""User attribute of a study: whose it is."""

_MAY_WRITE = (
    "SELECT has_table_privilege('studies', 'INSERT') AND has_table_privilege('trials', 'UPDATE'), "
    "current_user"
)
_MAY_MAKE = "SELECT has_schema_privilege(current_schema(), 'CREATE'), current_user"
_PASSWORDS = f"put it into ~/.pgpass (0600) or PGPASSWORD; or give the whole URL in {VARIABLE}"
_PACKAGES = {
    "psycopg": "psycopg[binary]",
    "psycopg2": "psycopg2-binary",
    "pymysql": "pymysql",
    "mysqldb": "mysqlclient",
}
_MODULES = {"mysqldb": "MySQLdb"}
_SQLITE_WAIT_SECONDS = 60
_SERVER_WAIT_SECONDS = 10
_BEING_MADE = "already exists"
_UPDATE = "Update this one with: pip install -U optuna"
_UPGRADE = "Back it up, then bring it up to date with: optuna storage upgrade --storage URL"


def resolve_storage_uri(option: str | None) -> str | None:
    """The storage that was asked for, or DPSWEEP_STORAGE; None for the state folder's own.

    Raises:
        ConfigError: If it is no database that can hold a study, or the option shows a password.
    """
    refuse_password("--storage", option, _PASSWORDS)
    given = option or os.environ.get(VARIABLE)
    return complete_uri(given) if given else None


def resolve_moved_uri(option: str | None) -> str | None:
    """Resolve the storage that a launched sweep's study has moved to; None if it has not.

    Raises:
        ConfigError: As `resolve_storage_uri` does.
    """
    return resolve_storage_uri(option) if option else None


def complete_uri(uri: str) -> str:
    """`uri` with its driver named, and the path of a file made absolute.

    >>> complete_uri("postgresql://me@host/sweeps")
    'postgresql+psycopg://me@host/sweeps'

    Raises:
        ConfigError: If it is no database that can hold a study.
    """
    try:
        url = make_url(add_driver(uri))
    except (ArgumentError, ValueError) as e:
        raise ConfigError(
            f"--storage {redact_password(uri)}: is no database URL. Expected "
            f"postgresql://USER@HOST/DATABASE, or leave the option out for a file in the state "
            f"folder"
        ) from e
    kind = url.drivername
    if kind.partition("+")[0] not in ("postgresql", "mysql", "sqlite"):
        raise ConfigError(
            f"--storage {_redact_url(url)}: a study is kept in postgresql, mysql or sqlite, not in "
            f"{kind}. Give postgresql://USER@HOST/DATABASE"
        )
    if kind.startswith("sqlite") and url.database:
        url = url.set(database=str(Path(url.database).expanduser().absolute()))
    return url.render_as_string(hide_password=False)


def open_storage(uri: str) -> optuna.storages.RDBStorage:
    """The storage at `uri`, its tables made if they are not there.

    Raises:
        ConfigError: If the driver for this kind of database is not installed.
        ConnectionRefused: If the database does not answer.
        StateError: If its tables are another version's.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)  # what fails is raised as well
    url = make_url(uri)
    _check_driver(url)
    with _explain_errors(url):
        try:
            storage = optuna.storages.RDBStorage(uri, _get_engine_options(url))
        except DBAPIError as e:
            if _BEING_MADE not in str(e):
                raise
            storage = optuna.storages.RDBStorage(
                uri, _get_engine_options(url)
            )  # another made them just now
    sqlalchemy.event.listen(storage.engine, "handle_error", _make_disk_full_handler(url))
    if not url.drivername.startswith("sqlite"):
        retry_connections(storage.engine, _redact_url(url))
    weakref.finalize(storage, _close, storage.scoped_session, storage.engine)
    return storage


def _close(sessions: scoped_session[Session], engine: Engine) -> None:
    """Close the connections of a storage that nobody holds any more."""
    sessions.remove()
    engine.dispose()


def check_storage(uri: str, study: str | None = None, owner: str | None = None) -> None:
    """Raise if no study can be kept at `uri`, or its name is taken; make no tables.

    Args:
        study: Name of the sweep that is to have a study there.

    Raises:
        ConfigError, ConnectionRefused: As `open_storage` does.
        StateError: If the tables are another version's, or hold a study of this name.
    """
    url = make_url(uri)
    _check_driver(url)
    with _explain_errors(url):
        engine = sqlalchemy.create_engine(url, **_get_engine_options(url))
        with engine.connect() as connection:
            used = sqlalchemy.inspect(connection).has_table("studies")
        engine.dispose()
    if not used:
        return
    there = list_study_names(uri)  # and its tables are looked at
    if study and owner:
        study = choose_study_name(uri, study, owner)
    if study in there:
        raise make_study_taken_error(study or "", uri)


def check_rights(uri: str) -> None:
    """Raise StateError if studies cannot be written at `uri`; ask, and write nothing."""
    url = make_url(uri)
    if not url.drivername.startswith("postgresql"):
        return
    with _explain_errors(url):
        engine = sqlalchemy.create_engine(url, **_get_engine_options(url))
        with engine.connect() as connection:
            used = sqlalchemy.inspect(connection).has_table("studies")
            asked = sqlalchemy.text(_MAY_WRITE if used else _MAY_MAKE)
            allowed, user = connection.execute(asked).one()
        engine.dispose()
    if not allowed:
        right = "write to the tables there" if used else "make tables there"
        grant = "INSERT, UPDATE, DELETE, SELECT ON ALL TABLES IN" if used else "CREATE, USAGE ON"
        raise StateError(
            f"--storage {_redact_url(url)}: user {user} may not {right}. As the database's owner: "
            f"GRANT {grant} SCHEMA public TO {user}"
        )


def list_study_names(uri: str) -> list[str]:
    """Studies in the storage."""
    storage = open_storage(uri)
    try:
        return [study.study_name for study in storage.get_all_studies()]
    finally:
        storage.engine.dispose()


def choose_study_name(uri: str | None, sweep: str, owner: str) -> str:
    """Choose the name of a new sweep's study: the sweep's, or OWNER/SWEEP if that is another's."""
    if uri is None:  # a state folder's own, which has one owner
        return sweep
    storage = open_storage(uri)
    try:
        if sweep not in {study.study_name for study in storage.get_all_studies()}:
            return sweep
        attrs = storage.get_study_user_attrs(storage.get_study_id_from_name(sweep))
        return f"{owner}/{sweep}" if attrs.get(OWNER) not in (None, owner) else sweep
    finally:
        storage.engine.dispose()


def make_study_taken_error(study: str, uri: str) -> StateError:
    """The error for a study that is in the storage before its sweep was launched."""
    url = make_url(uri)
    of = "" if url.drivername.startswith("sqlite") else ", of another state folder"
    return StateError(
        f"name: the storage already has a study called {study!r}{of} ({_redact_url(url)}). Launch "
        f"under another name with --name {study}-2; if its state folder is gone, see: dpsweep gc"
    )


def check_study_owner(study: optuna.Study, folder_id: str, uri: str) -> None:
    """Raise StateError if `study` belongs to another sweep's folder than `folder_id`.

    One without an owner and without trials was made by a driver that died at once; it is ours.
    So is any in a state folder's own file, from before owners were written down.
    """
    owner, url = study.user_attrs.get(FOLDER), make_url(uri)
    if owner is None and (url.drivername.startswith("sqlite") or not study.get_trials(False)):
        study.set_user_attr(FOLDER, folder_id)
    elif owner != folder_id:
        raise StateError(
            f"--storage {_redact_url(url)}: its study {study.study_name!r} belongs to a sweep of "
            f"another state folder; going on with it would mix their trials. Name that state "
            f"folder with --state, or this sweep's storage with --storage"
        )


def _get_engine_options(url: URL) -> dict[str, Any]:
    if url.drivername.startswith("sqlite"):
        return {
            "connect_args": {"timeout": _SQLITE_WAIT_SECONDS},
            "pool_events": [(_enable_wal, "connect")],
        }
    timeouts = {"connect_timeout": _SERVER_WAIT_SECONDS}
    return {"pool_pre_ping": True, "connect_args": timeouts}


def _enable_wal(connection: sqlite3.Connection, record: object) -> None:
    use_write_ahead_log(connection, "FULL")


def _make_disk_full_handler(url: URL) -> Callable[[ExceptionContext], None]:
    def raise_if_full(context: ExceptionContext) -> None:
        words = str(context.original_exception)
        if "disk is full" in words or "No space left on device" in words:
            if not url.drivername.startswith("sqlite"):
                raise DiskFull(f"--storage {_redact_url(url)}: the database server's disk is full")
            raise disk_full_error(Path(url.database or ".").parent) from context.original_exception

    return raise_if_full


def _check_driver(url: URL) -> None:
    kind, _, named = url.drivername.partition("+")
    driver = named or {"mysql": "mysqldb"}.get(kind)  # SQLAlchemy's own choice
    if driver and find_spec(_MODULES.get(driver, driver)) is None:
        package = _PACKAGES.get(driver, driver)
        raise ConfigError(
            f"--storage {_redact_url(url)}: needs the driver {driver}, which is not installed "
            "here. "
            f"Install it with: pip install '{package}'"
        )


@contextlib.contextmanager
def _explain_errors(url: URL) -> Iterator[None]:
    """Turn what Optuna and SQLAlchemy raise on opening into errors a user can act on."""
    try:
        yield
    except OperationalError as e:
        reason = str(e.orig).strip().splitlines()[0]
        remedy = (
            "Check that its folder is there and yours to write"
            if url.drivername.startswith("sqlite")
            else "Check host, port, database, user and password (PostgreSQL also reads ~/.pgpass)"
        )
        raise ConnectionRefused(
            f"--storage {_redact_url(url)}: the database does not answer: {reason}. {remedy}"
        ) from e
    except RuntimeError as e:
        if "table schema" not in str(e):
            raise
        newer = "updating optuna" in str(e)
        raise StateError(
            f"--storage {_redact_url(url)}: its tables were made by "
            f"{'a newer' if newer else 'an older'} Optuna than {optuna.__version__}. "
            + (_UPDATE if newer else _UPGRADE)
        ) from e


def _redact_url(url: URL) -> str:
    return redact_password(url.render_as_string(hide_password=False))
