"""How MLflow's server is started and its address shown, without importing MLflow."""

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit


def without_password(uri: str) -> str:
    """`uri` as it may be shown."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))


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
