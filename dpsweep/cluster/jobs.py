"""Ray's jobs on a cluster that is elsewhere: submit one, look at it, read what it says.

Two ways lead there, with the same verbs: HTTP to the dashboard (http://head:8265), and a Ray
client (ray://head:10001), through which a task on the head does the same for us. Nothing secret
goes into a job: its entrypoint, metadata and runtime environment are shown to whoever may see
the dashboard. Tokens are Ray's own (RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH).
"""

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import ray
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobDetails, JobSubmissionClient

from dpsweep.compat import HEAD_RESOURCE, PACKAGING_LOGGER, server_ray_version
from dpsweep.core.errors import ConnectionRefused, StateError

_OLDEST = (2, 60)
"""Ray's version that our trials need."""

_PATIENCE_SECONDS, _POLL_SECONDS = 120.0, 1.0
"""Longest loss of connection while a job is followed, and the time between two looks."""

_ENDS = ("STOPPED", "SUCCEEDED", "FAILED")
_CHATTY = ("ray.dashboard.modules.dashboard_sdk", PACKAGING_LOGGER)
_OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_FREE_ON_HEAD = {"num_cpus": 0, "resources": {HEAD_RESOURCE: 0.001}}


@dataclass(frozen=True)
class Job:
    """Id, status and message of a job."""

    id: str  # its submission id
    status: str  # PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED
    message: str  # why, in Ray's words
    exit_code: int | None  # of its process; None before its end, and if it never had one

    @property
    def has_ended(self) -> bool:
        """True if it does not run any more, and never will."""
        return self.status in _ENDS


class ClusterLost(ConnectionRefused):
    """A cluster that answered, and does not any more while a job of it is followed."""


class Jobs(Protocol):
    """The jobs of one cluster."""

    def submit(self, job_id: str, entrypoint: str, files: dict[str, bytes]) -> None:
        """Start a job in a folder that holds `files`, by relative path.

        Raises:
            StateError: If there is a job of that id.
        """

    def find(self, prefix: str) -> list[Job]:
        """Jobs whose id begins so."""

    def output(self, job_id: str) -> tuple[Job, str]:
        """A job, and all that it has said."""


def jobs_at(address: str) -> Jobs:
    """The jobs of the cluster at http(s)://HOST:PORT or ray://HOST:PORT.

    Raises:
        ConnectionRefused: If there is no cluster, or it does not let us in; says what to do.
    """
    check_scheme(address)
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}[parts.scheme]
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as e:
        raise ConnectionRefused(
            f"{address}: nothing answers there ({e}). Is the cluster up, and the address its "
            f"dashboard's? One on this machine is started with: dpsweep up --local"
        ) from e
    return _ThroughClient(address) if parts.scheme == "ray" else _Direct(address)


def check_scheme(address: str) -> None:
    """Raise ConnectionRefused if `address` cannot be one of a cluster."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    good = parts.scheme in ("http", "https") or (parts.scheme == "ray" and port)
    if not good or not parts.hostname:
        raise ConnectionRefused(
            f"{address}: expected http://HOST:8265 (the dashboard of the cluster's head), "
            f"https://HOST, or ray://HOST:10001"
        )
    if parts.password or parts.username:
        raise ConnectionRefused(
            f"{parts.scheme}://...@{parts.hostname}: names a user. Ray takes a token, from "
            f"RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN, and no user in the address"
        )


def follow(jobs: Jobs, job_id: str, show: Callable[[str], None]) -> tuple[Job, str]:
    """Show what a job says until it ends; return it, and all that it said.

    A connection that is lost for a while is no end: the job goes on without us.

    Raises:
        ClusterLost: If the cluster does not answer for two minutes.
    """
    shown, lost = 0, time.monotonic()
    while True:
        try:
            job, said = jobs.output(job_id)
            lost = time.monotonic()
        except ConnectionRefused as e:
            if time.monotonic() - lost > _PATIENCE_SECONDS:
                raise ClusterLost(str(e)) from e
            time.sleep(_POLL_SECONDS)
            continue
        show(said[shown:])
        shown = max(shown, len(said))
        if job.has_ended:
            return job, said
        time.sleep(_POLL_SECONDS)


class _Direct:
    """Through the dashboard's HTTP."""

    def __init__(self, address: str) -> None:
        self.address = address
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        with _translate_errors(address), _no_overrides():
            self._client = JobSubmissionClient(address)
        version = server_ray_version(self._client)
        if tuple(int(n) for n in version.split(".")[:2] if n.isdigit()) < _OLDEST:
            raise ConnectionRefused(
                f"{address}: Ray {version} runs there, and dpsweep needs "
                f"{'.'.join(map(str, _OLDEST))} or newer. Update the cluster"
            )

    def submit(self, job_id: str, entrypoint: str, files: dict[str, bytes]) -> None:
        with tempfile.TemporaryDirectory(prefix="dpsweep-submit-") as folder:
            for name, content in files.items():
                place = Path(folder) / name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
            with _translate_errors(self.address), _all_files():
                self._client.submit_job(
                    entrypoint=entrypoint, submission_id=job_id, runtime_env={"working_dir": folder}
                )

    def find(self, prefix: str) -> list[Job]:
        with _translate_errors(self.address):
            found = self._client.list_jobs()
        return [_job(d) for d in found if (d.submission_id or "").startswith(prefix)]

    def output(self, job_id: str) -> tuple[Job, str]:
        with _translate_errors(self.address):
            job = _job(self._client.get_job_info(job_id))  # before the log: that is then whole
            return job, str(self._client.get_job_logs(job_id))


class _ThroughClient:
    """Through a Ray client, where only its port is open: a task on the head speaks HTTP for us."""

    def __init__(self, address: str) -> None:
        self.address = address
        with _translate_errors(address), _no_overrides():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        self._do = ray.remote(**_FREE_ON_HEAD)(_on_head)

    def submit(self, job_id: str, entrypoint: str, files: dict[str, bytes]) -> None:
        self._call("submit", job_id, entrypoint, files)

    def find(self, prefix: str) -> list[Job]:
        found: list[Job] = self._call("find", prefix)
        return found

    def output(self, job_id: str) -> tuple[Job, str]:
        found: tuple[Job, str] = self._call("output", job_id)
        return found

    def _call(self, verb: str, *arguments: Any) -> Any:
        with _translate_errors(self.address):
            kind, result = ray.get(self._do.remote(verb, *arguments))
        if kind == "state":
            raise StateError(result)
        if kind == "connection":
            raise ConnectionRefused(result)
        return result


def _on_head(verb: str, *arguments: Any) -> tuple[str, Any]:
    """Run on the head: what happened, and the result or the message."""
    try:
        jobs = _Direct(ray.get_runtime_context().gcs_address)
        return "done", getattr(jobs, verb)(*arguments)
    except StateError as e:
        return "state", str(e)
    except ConnectionRefused as e:
        return "connection", str(e)


def _job(details: JobDetails) -> Job:
    return Job(
        details.submission_id or "",
        str(getattr(details.status, "value", details.status)),
        (details.message or "").strip(),
        details.driver_exit_code,
    )


@contextlib.contextmanager
def _no_overrides() -> Iterator[None]:
    """Ray lets two variables win over the address that was asked for; not here."""
    kept = {name: os.environ.pop(name) for name in _OVERRIDES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextlib.contextmanager
def _all_files() -> Iterator[None]:
    """Send all files: they were chosen already, and Ray must not apply a .gitignore in them."""
    name = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _translate_errors(address: str) -> Iterator[None]:
    """Turn errors on the way to a cluster into ones that name a remedy."""
    try:
        yield
    except AuthenticationError as e:
        raise ConnectionRefused(f"{address}: {_token_words()}") from e
    except (RuntimeError, RayError, ValueError, KeyError) as e:
        raise _refusal(address, str(e)) from e
    except ConnectionAbortedError as e:  # its client port answers, and nobody was started for us
        raise ConnectionRefused(
            f"{address}: the head could not start a Ray client for us ({_lines(str(e))[-1]}). If "
            f"it is busy, it waits too short a time for it (30 s; of the head, "
            f"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S). Try again, or go through its dashboard, "
            f"http://HEAD:8265"
        ) from e
    except OSError as e:
        raise ConnectionRefused(
            f"{address}: what answers there is no Ray dashboard, or not with this scheme "
            f"({_first_line(str(e))}). The dashboard is at port 8265 of the head, unless "
            f"--dashboard-port named another; ray:// is its client port, 10001"
        ) from e


def _token_words() -> str:
    how = (
        "export RAY_AUTH_MODE=token, and name the file with the cluster's token (0600) in "
        "RAY_AUTH_TOKEN_PATH, or put it at ~/.ray/auth_token"
    )
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return f"the cluster asks for a token, and RAY_AUTH_MODE is not set here. {how}"
    return f"the cluster asks for a token, and the one here is missing or wrong. {how}"


def _refusal(address: str, message: str) -> Exception:
    """The error for what Ray said in words alone."""
    first = _first_line(message)
    if "already exists" in message or "already been used" in message:
        return StateError(f"{address}: {first}")
    if "ray[default]" in message:
        return ConnectionRefused(
            f"{address}: Ray's jobs are not installed here. Add them with: "
            f"pip install 'dpsweep[cluster]'"
        )
    if "uthenticat" in message or "UNAUTHENTICATED" in message:
        return ConnectionRefused(f"{address}: {_token_words()}")
    if "does not exist" in message:
        return StateError(f"{address}: {first}")
    if "status code 404" in message or "returned 404" in message or message == "'ray_version'":
        return ConnectionRefused(
            f"{address}: something answers there, and it is no Ray dashboard ({first}). The "
            f"dashboard is at port 8265 of the head, unless --dashboard-port named another"
        )
    if "ersion" in message:
        return ConnectionRefused(
            f"{address}: {first} Use the same versions of Python and Ray here and on the cluster"
        )
    return ConnectionRefused(f"{address}: Ray says: {first}")


def _first_line(message: str) -> str:
    return _lines(message)[0]


def _lines(message: str) -> list[str]:
    lines = [line.strip()[:400] for line in message.splitlines() if line.strip()]
    return lines or ["no more"]
