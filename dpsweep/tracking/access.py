"""Access rights on a tracking server, asked of the server itself without MLflow's own retries.

MLflow answers /health to everybody, so that it tells nothing about rights.
"""

import configparser
import os
from pathlib import Path
from urllib.parse import urlsplit

import requests

from dpsweep.core.errors import ConnectionRefused
from dpsweep.tracking.server import redact_password

PASSWORDS = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or write them into "
    "~/.mlflow/credentials (0600)"
)
_SEARCH = "api/2.0/mlflow/experiments/search"
_FIRST = "api/2.0/mlflow/experiments/get?experiment_id=0"
_WAIT_SECONDS = 10


class NoAuth(requests.auth.AuthBase):
    """No credentials at all; without one, requests looks into ~/.netrc."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        return request


def check_rights(uri: str) -> None:
    """Raise ConnectionRefused if the server does not take this user's credentials."""
    answer = _request(uri, _read_credentials())
    if answer.status_code in (401, 403):
        given = "those given" if _read_credentials() else "none were given"
        raise ConnectionRefused(
            f"--tracking-uri {redact_password(uri)}: wants a name and a password, and {given} "
            f"({answer.status_code}). Please {PASSWORDS}"
        )


def allows_anonymous(uri: str) -> bool:
    """True if the server at http(s) `uri` lets anybody in."""
    return _request(uri, None).ok


def get_artifact_root(uri: str) -> str | None:
    """Get the server's artifact root: a URL or a path; None if the server does not say."""
    answer = _request(uri, _read_credentials(), _FIRST)
    if not answer.ok:
        return None
    try:
        place: str = answer.json()["experiment"]["artifact_location"]
    except (ValueError, KeyError, TypeError):
        return None
    return place


def request_proxied_artifacts(uri: str) -> int:
    """The server's answer to who asks it for the artifacts that it passes on."""
    return _request(
        uri, _read_credentials(), "api/2.0/mlflow-artifacts/artifacts?path="
    ).status_code


def _request(uri: str, who: tuple[str, str] | None, path: str = "") -> requests.Response:
    """One question to the server's REST interface, as somebody or as nobody."""
    place = f"{uri.rstrip('/')}/{path or _SEARCH}"
    auth = who or NoAuth()
    try:
        if path:
            return requests.get(place, auth=auth, timeout=_WAIT_SECONDS)
        return requests.post(place, json={"max_results": 1}, auth=auth, timeout=_WAIT_SECONDS)
    except requests.RequestException as e:  # its words may hold the address with a password
        raise ConnectionRefused(
            f"--tracking-uri {redact_password(uri)}: does not answer ({type(e).__name__}) at "
            f"{urlsplit(place).path}. Is it an MLflow server?"
        ) from None


def _read_credentials() -> tuple[str, str] | None:
    """Name and password as MLflow finds them: in the environment, or in its file."""
    file = configparser.ConfigParser()
    try:
        file.read(Path("~/.mlflow/credentials").expanduser())
        stored = dict(file["mlflow"]) if "mlflow" in file else {}
    except (OSError, configparser.Error):
        stored = {}
    name = os.environ.get("MLFLOW_TRACKING_USERNAME") or stored.get("mlflow_tracking_username")
    word = os.environ.get("MLFLOW_TRACKING_PASSWORD") or stored.get("mlflow_tracking_password")
    return (name, word) if name and word else None
