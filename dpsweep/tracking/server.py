"""Command that starts MLflow's server, and addresses without passwords, without MLflow itself."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote_plus, urlsplit

from dpsweep.core.errors import ConfigError

_USER = re.compile(r"^(?![^:/]*:///)((?:[^:/]*+:?/++)?+[^:/]*):(.*)@", re.DOTALL)
"""Scheme and user, and a password up to the last @: one that was not quoted may hold / ? # and @.

After three slashes there is a path, and nobody.
"""

_SECRET = re.compile(r"(password|passwd|pwd|token|secret|(?<!ssl)(?<!ssl_)key)\s*$", re.IGNORECASE)
"""Endings of the names of secrets; sslkey names a file."""


def redact_password(uri: str) -> str:
    """`uri` as it may be shown; rather too little of it than a password.

    >>> redact_password("postgresql://me:secret@host/db?password=secret&sslmode=require")
    'postgresql://me:***@host/db?password=***&sslmode=require'
    """
    before, mark, query = _USER.sub(r"\1:***@", uri).partition("?")
    return before + mark + "&".join(map(_redact_setting, query.split("&")))


def _redact_setting(setting: str) -> str:
    """KEY=VALUE without the value of a secret; a name may be quoted, as in pass%77ord."""
    key, equals, _ = setting.partition("=")
    return f"{key}=***" if equals and _SECRET.search(unquote_plus(key)) else setting


def refuse_password(option: str, uri: str | None, remedy: str) -> None:
    """Raise ConfigError for a URL with a password in it: everybody here can read command lines."""
    if uri and redact_password(uri) != uri:
        raise ConfigError(
            f"{option} {redact_password(uri)}: has a password in it, which every user of this "
            f"machine can read in its list of processes. Leave it out there, and {remedy}"
        )


def add_driver(uri: str) -> str:
    """`uri`, of a database with its driver named: SQLAlchemy would take the one we do not install.

    >>> add_driver("postgresql://me@host/mlflow"), add_driver("http://host:5000")
    ('postgresql+psycopg://me@host/mlflow', 'http://host:5000')
    """
    kind, mark, rest = uri.partition("://")
    kind = re.sub(r"^postgres(?=\+|$)", "postgresql", kind)
    if kind == "postgresql":
        kind += "+psycopg" if find_spec("psycopg") or not find_spec("psycopg2") else "+psycopg2"
    return kind + mark + rest


def is_server(uri: str) -> bool:
    """True for an MLflow server, which puts artifacts where it likes; False for a database."""
    return urlsplit(uri).scheme in ("http", "https")


def build_server_command(uri: str, artifacts: Path, host: str, port: int) -> list[str]:
    """The command that serves MLflow's UI over a database, with no background jobs."""
    return [
        *(sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri),
        *("--default-artifact-root", artifacts.absolute().as_uri(), "--workers", "1"),
        *("--host", host, "--port", str(port)),
    ]


def build_server_environment() -> dict[str, str]:
    """The environment for `build_server_command`."""
    return {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
