"""How MLflow's server is started and its address shown, without importing MLflow."""

import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

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
