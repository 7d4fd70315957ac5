"""Services of a local cluster besides Ray: PostgreSQL, an S3 store, and MLflow.

PostgreSQL keeps the studies and MLflow's tables, and asks for a password; its files stay from one
`up` to the next. The S3 store is moto's server, which keeps objects in memory and believes every
key: for trying and testing alone. MLflow's server has basic authentication. All listen on
127.0.0.1. Passwords are drawn by `up` and lie in files that only their owner can read.
"""

import json
import os
import pwd
import secrets
import shutil
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpsweep.cluster.local import Local, belongs_to, plain_environment
from dpsweep.cluster.processes import (
    HOST,
    Process,
    free_port,
    http_status,
    listens,
    run,
    start,
    wait_for,
)
from dpsweep.core.disk import write_atomically
from dpsweep.core.errors import ConnectionRefused, StateError

USER, BUCKET = "dpsweep", "mlflow"
_DATABASES = ("mlflow", "mlflow_auth", "sweeps")
_READY_SECONDS = 180.0
_PORTS = ("postgres", "s3", "mlflow")
_NEEDED = {"moto": "moto", "boto3": "boto3", "flask_wtf": "flask-wtf", "psycopg": "psycopg"}


def check_installed() -> None:
    """Raise StateError, naming all that `up --tracking` lacks here."""
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise StateError(
            f"up --tracking: {', '.join(missing)} not installed. Add them with: "
            f"pip install 'dpsweep[local]'"
        )
    _programs()


def start_services(local: Local) -> None:
    """Start all three, and tell `local` what nodes and users need to reach them."""
    local.ports |= {name: free_port(local.ports.get(name)) for name in _PORTS}
    words = _secrets(local.folder / "secrets.json")
    postgres(local, words["postgres"])
    s3(local)
    mlflow(local, words)
    pgpass, tracking = str(local.folder / "pgpass"), f"http://{HOST}:{local.ports['mlflow']}"
    users = {
        "MLFLOW_TRACKING_URI": tracking,
        "MLFLOW_TRACKING_USERNAME": "admin",
        "MLFLOW_TRACKING_PASSWORD": words["mlflow"],
    }
    local.client_extra |= users
    local.extra |= {
        **users,
        "PGPASSFILE": pgpass,
        "DPSWEEP_STORAGE": f"postgresql://{USER}@{HOST}:{local.ports['postgres']}/sweeps",
    }
    local.store()


def postgres(local: Local, password: str) -> None:
    """A PostgreSQL server with our databases; its files are made the first time."""
    programs, who, port = _programs(), _drop_root(), local.ports["postgres"]
    home = _home(local, who)
    write_atomically(local.folder / "pgpass", f"{HOST}:*:*:{USER}:{password}\n".encode())
    environment = {**plain_environment(local.id), "PGPASSFILE": str(local.folder / "pgpass")}
    fresh = not (home / "ready").exists()
    if fresh:
        _make_database(programs, home, password, environment, who)
    command = [f"{programs / 'postgres'}", "-D", f"{home / 'data'}", "-p", str(port), "-h", HOST]
    command += ["-k", f"{home}"]
    ready, how = partial(listens, port), {"end_signal": signal.SIGINT, "cwd": home, **who}
    _start_service(local, "PostgreSQL", "postgres", command, environment, ready, **how)
    if fresh:
        for name in _DATABASES:
            where = ("-h", HOST, "-p", str(port), "-U", USER, "-w")
            run([programs / "createdb", *where, name], environment, cwd="/")
        (home / "ready").touch()


def s3(local: Local) -> None:
    """An S3 endpoint with our bucket."""
    port = local.ports["s3"]
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    environment, ready = plain_environment(local.id), partial(listens, port)
    process = _start_service(local, "the S3 store", "s3", command, environment, ready)
    make = urllib.request.Request(f"http://{HOST}:{port}/{BUCKET}", method="PUT")
    try:
        urllib.request.urlopen(make, timeout=30).close()
    except OSError as e:
        raise ConnectionRefused(
            f"the S3 store makes no bucket {BUCKET!r} ({e}). Its own words are in {process.log}"
        ) from e


def mlflow(local: Local, words: dict[str, str]) -> None:
    """MLflow's server over both; one worker and no background jobs."""
    port, database = local.ports["mlflow"], local.ports["postgres"]
    url = f"postgresql+psycopg://{USER}@{HOST}:{database}"
    config = local.folder / "basic_auth.ini"
    write_atomically(
        config,
        (
            "[mlflow]\n"
            "default_permission = READ\n"
            f"database_uri = {url}/mlflow_auth\n"
            "admin_username = admin\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        ).encode(),
    )
    environment = {
        **plain_environment(local.id),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_BACKEND_STORE_URI": f"{url}/mlflow",
        "MLFLOW_ARTIFACTS_DESTINATION": f"s3://{BUCKET}",
        "MLFLOW_SERVER_ALLOWED_HOSTS": f"{HOST}:{port},localhost:{port}",
        "MLFLOW_AUTH_CONFIG_PATH": str(config),
        "MLFLOW_AUTH_ADMIN_PASSWORD": words["mlflow"],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": words["csrf"],
        "PGPASSFILE": str(local.folder / "pgpass"),
        "MLFLOW_S3_ENDPOINT_URL": f"http://{HOST}:{local.ports['s3']}",
        "AWS_ACCESS_KEY_ID": "moto-believes-every-key",
        "AWS_SECRET_ACCESS_KEY": "moto-believes-every-key",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth"),
        *("--host", HOST, "--port", str(port), "--workers", "1", "--serve-artifacts"),
    ]
    healthy = f"http://{HOST}:{port}/health"
    _start_service(
        local, "MLflow", "mlflow", command, environment, lambda: http_status(healthy) == 200
    )


def _start_service(
    local: Local,
    name: str,
    log: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    ready: Callable[[], bool],
    **how: Any,
) -> Process:
    """Start a service, write it down, and wait until it is `ready`; it runs in `local`'s folder."""
    place, how = local.folder / "logs" / f"{log}.log", {"cwd": local.folder, **how}
    process = start(name, command, place, environment, **how)
    local.services.append(process)
    local.store()
    wait_for(ready, process, _READY_SECONDS)
    return process


def _secrets(place: Path) -> dict[str, str]:
    """Passwords, drawn the first time: databases remember them."""
    if not place.exists():
        drawn = {name: secrets.token_hex(24) for name in ("postgres", "mlflow", "csrf")}
        write_atomically(place, json.dumps(drawn).encode())
    known: dict[str, str] = json.loads(place.read_text())
    return known


def _home(local: Local, who: dict[str, Any]) -> Path:
    """Folder of the server's files; under root, one of the server's own user."""
    if not who:
        return local.folder / "postgres"
    if not belongs_to(who["user"], local.database):
        local.database = tempfile.mkdtemp(prefix="dpsweep-up-")
        shutil.chown(local.database, who["user"], who["group"])
        local.store()
    return Path(local.database)


def _make_database(
    programs: Path, home: Path, password: str, environment: dict[str, str], who: dict[str, Any]
) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700)
    note = home / "password"
    note.touch(mode=0o600)
    note.write_text(password)
    if who:
        for place in (home, note):
            shutil.chown(place, who["user"], who["group"])
    options = ("-U", USER, "--auth=scram-sha-256", "--pwfile", note, "--no-sync")
    try:
        run([programs / "initdb", "-D", home / "data", *options], environment, cwd=home, **who)
    finally:
        note.unlink()


def _programs() -> Path:
    """Folder of PostgreSQL's programs; Debian keeps them off PATH."""
    found = shutil.which("initdb")
    places = [Path(found).parent, Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for place in places:
        if all((place / name).exists() for name in ("initdb", "postgres", "createdb")):
            return place
    raise StateError(
        "up --tracking: no PostgreSQL server is installed here. Add it with: apt-get install "
        "postgresql, or leave out --tracking"
    )


def _drop_root() -> dict[str, Any]:
    """Arguments for subprocess: PostgreSQL refuses to run as root.

    Raises:
        StateError: If there is nobody to run it as.
    """
    if os.getuid():
        return {}
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError as e:
        raise StateError(
            "up --tracking: PostgreSQL does not run as root, and this machine has no user `nobody` "
            "to run it as. Run dpsweep as another user than root, or leave out --tracking"
        ) from e
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
