"""How MLflow's server is started and its address shown, without importing MLflow."""

import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

from dpsweep.core.errors import ConfigError

_SECRET = re.compile(r"(\b(?:password|passwd|pwd|token|secret)=)[^&]*", re.IGNORECASE)


def without_password(uri: str) -> str:
    """`uri` as it may be shown.

    >>> without_password("postgresql://me:secret@host/db?password=secret&sslmode=require")
    'postgresql://me:***@host/db?password=***&sslmode=require'
    """
    try:
        parts = urlsplit(uri)
    except ValueError:
        return "***"
    user, at, _ = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    shown = uri.replace(f"{user}@", f"{name}:***@", 1) if at and colon else uri
    before, mark, query = shown.partition("?")
    return before + mark + _SECRET.sub(r"\1***", query)


def refuse_password(option: str, uri: str | None, remedy: str) -> None:
    """Raises ConfigError for a URL with a password in it: everybody here can read command lines."""
    if uri and without_password(uri) != uri:
        raise ConfigError(
            f"{option} {without_password(uri)}: has a password in it, which every user of this "
            f"machine can read in its list of processes. Leave it out there, and {remedy}"
        )


def server_command(uri: str, artifacts: Path, host: str, port: int) -> list[str]:
    """The command that serves MLflow's UI over a database, with no background jobs."""
    return [
        *(sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri),
        *("--default-artifact-root", artifacts.absolute().as_uri(), "--workers", "1"),
        *("--host", host, "--port", str(port)),
    ]


def server_environment() -> dict[str, str]:
    """The environment for `server_command`."""
    return {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
