"""A Ray cluster for the length of one sweep: an embedded one, or one that is there already."""

import contextlib
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray

from dpsweep.core.errors import ConnectionRefused, iter_causes, summarize_error

_QUIET = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_DEDUP_LOGS": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_MAX_PENDING_TRIALS_PG": "100000",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_THRESHOLD_S": "30",
}
"""Settings of Ray's: no output of its own, no files we do not read, signals left to us. How many
trials are placed at once is counted by our searcher (execution/elastic.py), not by Tune."""


_PREFIX = "dpsweep-ray-"


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Connect to Ray, and let go of it at the end. An embedded cluster ends with it.

    Args:
        address: None for an embedded cluster; auto or HOST:PORT for another.

    Raises:
        ConnectionRefused: If nothing answers at the address.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for name in ("ray.tune", "ray.train"):  # what goes wrong in a trial is told by the driver
        logging.getLogger(name).setLevel(logging.CRITICAL)
    folder = None
    try:
        if address is None:
            _remove_orphans()
            folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")  # holds socket paths
            _start(folder)
        else:
            _join(address)
        yield
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str) -> None:
    """Start an embedded cluster. Its files, and the token Ray may write, are this user's alone."""
    before = os.umask(0o077)
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=200 * 1024**2,
            _temp_dir=folder,
        )
    except Exception as e:  # Ray has no type of its own for it
        raise ConnectionRefused(
            f"Ray did not start on this machine: {summarize_error(e)} If the machine is busy "
            f"or short of memory, wait, and try again; a sweep goes on with: dpsweep resume NAME"
        ) from e
    finally:
        os.umask(before)


def _remove_orphans() -> None:
    for place in orphans():
        shutil.rmtree(place, ignore_errors=True)


def orphans() -> Iterator[Path]:
    """Find the folders that embedded clusters of killed drivers left behind."""
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = place.name.removeprefix(_PREFIX).partition("-")[0]
        if _is_ours(place) and pid.isdigit() and not _is_alive(int(pid)):
            yield place


def _is_ours(place: Path) -> bool:
    """True for a folder of this user's: anybody may put anything beside it, links included."""
    try:
        found = place.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's process
        return True
    return True


def _join(address: str) -> None:
    check_answers(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as e:
        raise ConnectionRefused(
            f"--address {address}: Ray does not take the connection: {explain_refusal(e)}"
        ) from e


def explain_refusal(error: Exception) -> str:
    """Explain why Ray takes no connection, and what to do: token, versions, or Ray's own words."""
    words = "\n".join(str(cause) for cause in iter_causes(error))
    if "InvalidAuthToken" in words:
        return (
            "the token here is missing or not the cluster's. Set RAY_AUTH_MODE=token, and name "
            "the file with the cluster's token with RAY_AUTH_TOKEN_PATH (else ~/.ray/auth_token)"
        )
    versions = re.findall(r"\b(Ray|Python): (\S+)", words)
    if "Version mismatch" in words and len(versions) >= 4:
        there, here = (", ".join(" ".join(v) for v in versions[i : i + 2]) for i in (0, 2))
        return f"it runs {there}, and here is {here}. Install the same versions on both sides"
    return (
        f"{summarize_error(error)} Start a cluster with: ray start --head; or leave --address out "
        f"for an embedded one"
    )


def check_answers(address: str) -> None:
    """Raise ConnectionRefused if nothing listens at HOST:PORT; Ray itself waits for minutes."""
    if address in ("auto", "local"):
        return
    if "://" in address:
        raise ConnectionRefused(
            f"--address {address}: from here Ray would run the trials away from the study, the "
            f"lease and the state folder. Send the sweep there, with: dpsweep submit FILE --to "
            f"{address}; or run this on a node of the cluster, with --address auto"
        )
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConnectionRefused(
            f"--address {address}: expected auto or HOST:PORT, such as 127.0.0.1:6379"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as e:
        raise ConnectionRefused(
            f"--address {address}: nothing answers there ({e}). Start a cluster with: ray start "
            f"--head --port {port}; or leave --address out for an embedded one"
        ) from e
