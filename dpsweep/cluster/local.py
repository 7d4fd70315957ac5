"""A real Ray cluster of several nodes on this machine, to try the service and to test it.

Each node is a `ray start --block` of its own, in a session of its own, with token authentication,
and with a folder of its own: nodes that shared one would delete each other's working folders.
They outlive their starter. The dashboard is at 127.0.0.1; Ray's other ports listen wherever Ray
wants them, and ask for the token. What is started is written down first of all:

FOLDER/up.json       what runs, with process numbers and times of birth, and ports (0600)
FOLDER/env           what a shell needs to talk to it (0600); source it
FOLDER/ray_token     the token (0600)
FOLDER/logs/         what the processes say
FOLDER/state/        DPSWEEP_STATE of the nodes
RUNTIME              a short path in the system's folder for temporary files: Ray's sockets and logs
DATABASE             the like for PostgreSQL, whose user is another under root

From Python, as the chaos tests use it:

    with running(folder, nodes=3, cpus=1) as local:
        local.kill_node(1)              # all of its processes, as a power cut does
        local.add_node()
        local.restart_head()            # the same ports; workers join again
        local.environment, local.jobs_address, local.address, local.nodes, local.state
"""

import contextlib
import fcntl
import json
import os
import secrets
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dpsweep.cluster.processes import HOST, MARK, Process, end, free_port, start, sweep_up, wait_for
from dpsweep.core.disk import write_atomically
from dpsweep.core.errors import StateError

_READY_SECONDS = 120.0
_STORE_BYTES = 100 * 1024**2
_PORTS = ("gcs", "dashboard", "client", "agent")
_LEAVE_OUT = ("RAY_", "DPSWEEP_", "MLFLOW_", "AWS_", "PG")
"""Settings of the starter's own, which would speak of another cluster."""


@dataclass
class Local:
    """A cluster on this machine, running or not."""

    folder: Path  # where it is written down
    id: str = ""  # mark of its processes; empty before it is up
    runtime: str = ""  # folder for what needs a short path
    # PostgreSQL's folder, where it may not run as our user; empty if it has none
    database: str = ""
    cpus: int = 1  # CPUs of a node, as Ray counts them
    # what listens where; kept from one `up` to the next where they are still free
    ports: dict[str, int] = field(default_factory=dict)
    # the processes that are nodes, the head first
    nodes: list[Process] = field(default_factory=list)
    # what else was started (cluster/services.py)
    services: list[Process] = field(default_factory=list)
    # environment that services add to the nodes'
    extra: dict[str, str] = field(default_factory=dict)
    # environment that services add to the user's
    client_extra: dict[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, folder: Path) -> "Local":
        """Read the cluster recorded in `folder`; one without processes if there is no file.

        Raises:
            StateError: If it cannot be read.
        """
        place = folder / "up.json"
        try:
            known: dict[str, Any] = json.loads(place.read_text())
            for key in ("nodes", "services"):
                known[key] = [Process(**process) for process in known[key]]
            return cls(folder, **known)
        except FileNotFoundError:
            return cls(folder)
        except (ValueError, TypeError, KeyError) as e:
            raise StateError(
                f"{place}: cannot be read ({type(e).__name__}: {e}). What still runs of it has "
                f"{MARK} in its environment: grep -l {MARK} /proc/[0-9]*/environ. End that, and "
                f"delete {folder}"
            ) from e

    @property
    def state(self) -> Path:
        """The state folder of sweeps that run there."""
        return self.folder / "state"

    @property
    def address(self) -> str:
        """For --address, on this machine."""
        return f"{HOST}:{self.ports['gcs']}"

    @property
    def client_address(self) -> str:
        """For --address, from elsewhere."""
        return f"ray://{HOST}:{self.ports['client']}"

    @property
    def jobs_address(self) -> str:
        """For `dpsweep submit --to`; the dashboard, too."""
        return f"http://{HOST}:{self.ports['dashboard']}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that a program needs to talk to the cluster."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray_token"),
            "DPSWEEP_TO": self.jobs_address,
            **self.client_extra,
        }

    @property
    def is_up(self) -> bool:
        """True while anything that was started runs."""
        return any(process.is_alive for process in [*self.nodes, *self.services])

    def prepare(self, cpus: int) -> None:
        """Make folders, token and id for a new cluster, and end what is left of the last one.

        Raises:
            StateError: If it is up.
        """
        if sys.platform != "linux":
            raise StateError(f"up --local: needs Linux's /proc; this is {sys.platform}")
        if self.is_up:
            raise StateError(
                f"{self.folder}: a local cluster is up already, with {self.jobs_address}. Use it, "
                f"or end it with: dpsweep down"
            )
        self.down()
        for place in (self.folder, self.folder / "logs", self.state):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not belongs_to(os.geteuid(), self.runtime):
            self.runtime = tempfile.mkdtemp(prefix="dpsweep-up-")
        self.id, self.cpus = secrets.token_hex(16), cpus
        self.ports |= {name: free_port(self.ports.get(name)) for name in _PORTS}
        self.extra, self.client_extra = {}, {}
        self.nodes, self.services = [], []
        write_atomically(self.folder / "ray_token", secrets.token_hex(32).encode())
        self.store()

    def start_nodes(self, count: int) -> None:
        """Start the head, and `count` - 1 workers beside it."""
        self._start_head()
        joining = [self._start_worker() for _ in range(count - 1)]
        for process in joining:
            self._wait_for_nodes(process, count)
        text = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in self.environment.items()
        )
        write_atomically(self.folder / "env", text.encode())

    def add_node(self) -> Process:
        """One more worker node, after it has joined."""
        count = len([node for node in self.nodes if node.is_alive]) + 1
        process = self._start_worker()
        self._wait_for_nodes(process, count)
        return process

    def kill_node(self, number: int) -> None:
        """Kill every process of node `number` of `nodes` at once; 0 is the head."""
        process = self.nodes[number]
        pids = process.members()
        for pid in pids:  # first all are stopped, so that none can say goodbye
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        sweep_up([process], mark=None)

    def restart_head(self) -> None:
        """Kill the head, and start one on the same ports, with as many workers as there were.

        Ray keeps its tables in the head's memory: nodes of the old head cannot stay.
        """
        workers = len([node for node in self.nodes[1:] if node.is_alive])
        for number in range(len(self.nodes)):
            self.kill_node(number)
        self.nodes = []
        self.start_nodes(1 + workers)

    def down(self) -> int:
        """End exactly what was started, and return how many processes that were.

        State, databases and logs stay, for the next `up`.
        """
        if not self.id:
            return 0
        ended = end([*self.services, *self.nodes], self.id)
        for place in Path(self.runtime).glob("ray-*"):
            shutil.rmtree(place, ignore_errors=True)
        (self.folder / "env").unlink(missing_ok=True)
        self.nodes, self.services = [], []
        self.store()
        return ended

    def remove(self) -> None:
        """End it, and delete all of its files: state, databases, artifacts, logs."""
        self.down()
        for place in filter(None, (self.runtime, self.database)):
            shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self) -> None:
        """Write down what is known."""
        known = asdict(self)
        del known["folder"]
        write_atomically(self.folder / "up.json", json.dumps(known, indent=1).encode())

    def node_environment(self) -> dict[str, str]:
        """The environment of a node, and so of every job and trial there."""
        return {
            **plain_environment(self.id),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "ray_token"),
            "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",  # one machine for all is busy
            "DPSWEEP_STATE": str(self.state),
            **self.extra,
        }

    def _start_head(self) -> None:
        ports = self.ports
        head = self._start_node(
            *("--head", "--port", str(ports["gcs"]), "--dashboard-host", HOST),
            *("--include-dashboard", "true", "--dashboard-port", str(ports["dashboard"])),
            *("--ray-client-server-port", str(ports["client"])),
            *("--dashboard-agent-listen-port", str(ports["agent"])),
        )
        self._wait_for_nodes(head, 1)

    def _start_worker(self) -> Process:
        agent = free_port(None)
        return self._start_node(
            "--address", self.address, "--dashboard-agent-listen-port", str(agent)
        )

    def _start_node(self, *options: str) -> Process:
        number = len(self.nodes)
        process = start(
            f"Ray node {number}",
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options),
                *("--num-cpus", str(self.cpus), "--num-gpus", "0", "--disable-usage-stats"),
                *("--object-store-memory", str(_STORE_BYTES)),
                *("--min-worker-port", "0", "--max-worker-port", "0"),
                *("--temp-dir", f"{self.runtime}/ray-{number}"),
            ],
            self.folder / "logs" / f"node-{number}.log",
            self.node_environment(),
            cwd=self.runtime,
        )
        self.nodes.append(process)
        self.store()
        return process

    def _wait_for_nodes(self, process: Process, count: int) -> None:
        """Until the head answers, and knows of `count` living nodes."""
        wait_for(lambda: self.num_alive() >= count, process, _READY_SECONDS)

    def num_alive(self) -> int:
        """Nodes that the head thinks alive; 0 while it does not answer."""
        token = (self.folder / "ray_token").read_text()
        request = urllib.request.Request(
            f"{self.jobs_address}/nodes?view=summary", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                nodes = json.load(answer)["data"]["summary"]
        except (OSError, KeyError, ValueError):
            return 0
        return sum(node["raylet"].get("state") == "ALIVE" for node in nodes)


@contextlib.contextmanager
def running(folder: Path, *, nodes: int = 3, cpus: int = 1) -> Iterator[Local]:
    """A cluster without tracking, for the length of a block; its files are deleted after it."""
    local = Local(folder)
    try:
        local.prepare(cpus)
        local.start_nodes(nodes)
        yield local
    finally:
        local.remove()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Only one process at a time may start or end the cluster of a folder.

    Raises:
        StateError: If another does.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise StateError(
                f"{folder}: another `dpsweep up` or `down` is at work there. Wait for it"
            ) from e
        yield


def belongs_to(user: int, folder: str) -> bool:
    """True for a folder that this user alone may enter, and no link to one.

    Where it is gone from the system's folder for temporary files, others may have made another.
    """
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return found.st_uid == user and found.st_mode == stat.S_IFDIR | 0o700


def plain_environment(mark: str) -> dict[str, str]:
    """This process's environment without what speaks of another cluster, and with the mark."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LEAVE_OUT)}
    return {**kept, MARK: mark}
