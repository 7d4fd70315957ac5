"""Settings of SQLite connections: write-ahead log, and how far commits are synced."""

import contextlib
import sqlite3
from typing import Literal

Sync = Literal["FULL", "NORMAL"]
"""FULL: a commit survives a loss of power. NORMAL: only a crash of the process."""


def use_write_ahead_log(connection: sqlite3.Connection, sync: Sync) -> None:
    """Give a connection a write-ahead log, in which readers never block the writer.

    The journal is the file's own and stays as it is where it cannot be changed, because the
    file may only be read or is in use; the next connection tries again.
    """
    connection.execute(f"PRAGMA synchronous = {sync}")
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")
