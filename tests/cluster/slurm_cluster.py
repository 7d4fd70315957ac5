"""Slurm on this machine: a controller and two nodes, as far apart as namespaces can put them.

Each of them has a network, host name, processes, mounts, /tmp and /dev/shm of its own. What they
share is a FUSE file system that the kernel calls by the name of a cluster's (so that SQLite is
refused there), with the home of a user of their own, and a PostgreSQL server on the controller.
The daemons are Debian's: slurmctld, slurmd, munged. Nothing outside a temporary folder is written,
and all of it ends with the processes that hold the namespaces.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
USER, UID = "alice", 54321
NODES = {"ctl": "10.77.0.1", "n1": "10.77.0.11", "n2": "10.77.0.12"}
SHARED = Path("/mnt/shared")
"""Where each node has the shared file system mounted; the rest of /mnt is the test's own."""

HOME = SHARED / "home" / USER
CHECKOUT = HOME / "dpsweep"

_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "bindfs", "slurmctld", "slurmd", "munged")
_PACKAGES = "slurm-wlm munge bindfs iproute2 postgresql"

_CONF = """\
ClusterName=test
SlurmctldHost=ctl
AuthType=auth/munge
CredType=cred/munge
AuthInfo=cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/mnt/log/slurmctld.log
SlurmdLogFile=/mnt/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
KillWait=30
MinJobAge=3600
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n[1-2] CPUs=2 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """What this machine lacks for it; None if nothing."""
    if os.geteuid():
        return "not root, who alone may make the namespaces"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent or not _postgres():
        return f"{', '.join(absent) or 'PostgreSQL'} not installed: apt-get install {_PACKAGES}"
    if not Path("/dev/fuse").exists():
        return "no /dev/fuse here, for the shared file system"
    closed = [p for p in Path(sys.prefix).parents if not p.stat().st_mode & 0o001]
    return f"other users may not enter {closed[0]}, where this Python is" if closed else None


class Machine:
    """One of them: a process that holds its namespaces, and what runs in them."""

    def __init__(self, name: str, base: Path) -> None:
        self.name, self.base = name, base
        held = "--net --uts --mount --ipc --pid --fork --kill-child --mount-proc"
        holder = subprocess.Popen(
            ["unshare", *held.split(), "bash", "-c", _HOLD, name, str(base), sys.base_prefix],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._running = [holder]

    def connect(self, switch: int) -> None:
        """Waits for its namespaces, and gives it a network."""
        (holder, *_), name = self._running, self.name
        wait_for((self.base / "ready" / name).exists, f"{name} is up")
        self.init = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
        _run("nsenter", "-t", switch, "-n", "ip", "link", "add", f"to-{name}", "type", "veth",
             "peer", "name", "eth0", "netns", self.init)  # fmt: skip
        for words in (f"set to-{name} master br0", f"set to-{name} up"):
            _run("nsenter", "-t", switch, "-n", "ip", "link", *words.split())
        for words in ("link set lo up", f"addr add {NODES[name]}/24 dev eth0", "link set eth0 up"):
            self.run("ip", *words.split())

    def run(self, *command: object, **how: object) -> subprocess.CompletedProcess[str]:
        """Runs a command there as root, to its end."""
        return _run("nsenter", "-t", self.init, "-a", "-r", "-w/", *command, **how)

    def start(self, log: str, *command: object) -> None:
        """Starts a daemon there, whose words go to a file."""
        with (self.base / "log" / log).open("a") as file:
            daemon = subprocess.Popen(
                ["nsenter", "-t", str(self.init), "-a", "-r", "-w/", *map(str, command)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        self._running.append(daemon)

    def as_user(self, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs lines of a shell there, as the user types them in the checkout."""
        return self.run(
            *_user(UID), "env", "-i", *(f"{k}={v}" for k, v in (_LOGIN | environ).items()),
            "bash", "-ec", f"cd {CHECKOUT}\n{script}", check=False,
        )  # fmt: skip

    def kill(self) -> None:
        """As if its power had been cut."""
        for process in self._running:
            process.kill()
            process.wait()


_LOGIN = {
    **{"HOME": str(HOME), "USER": USER, "LOGNAME": USER, "PATH": "/usr/bin:/bin"},
    "PYTHONPATH": str(CHECKOUT),  # the environment may have another checkout's code
    "OMP_NUM_THREADS": "1",
    "DPSWEEP_PICTURES": "0",
    # On a machine with load 15 workers of Ray's niceness, 15, do not start within its 60 s.
    **{"RAY_worker_niceness": "0", "RAY_worker_register_timeout_seconds": "600"},
}

_HOLD = """
set -e
base=$1 python=$2
mount --make-rprivate /
if [[ $python == /root/* ]]; then  # else no other user may run it
    mount --bind "$python" "$base/python"
    mount -t tmpfs -o mode=755 tmpfs /root
    mkdir -p "$python" && mount --bind "$base/python" "$python"
fi
hostname "$0"
mount --bind "$base" /mnt
mount -t tmpfs tmpfs /tmp && chmod 1777 /tmp
mount -t tmpfs -o size=4g tmpfs /dev/shm && chmod 1777 /dev/shm
mount -t tmpfs tmpfs /run
for file in hosts passwd group; do mount --bind /mnt/etc/$file /etc/$file; done
mkdir -p /etc/slurm && mount --bind /mnt/etc/slurm /etc/slurm
mkdir -m 755 /run/munge && chown munge: /run/munge
bindfs -o fsname=server:/export,subtype=glusterfs /mnt/export /mnt/shared
touch /mnt/ready/"$0"
while sleep 1; do :; done
"""


def _user(uid: int) -> list[str]:
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def _postgres() -> Path | None:
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"))), None)


def _run(*command: object, check: bool = True, **how: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, timeout=900, **how
    )
    assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
    return done


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)


class Cluster:
    """The three machines, with Slurm on them."""

    def __init__(self, base: Path) -> None:
        self.base, self.machines = base, dict[str, Machine]()
        self.password = secrets.token_hex(16)
        self._switch: subprocess.Popen[bytes] | None = None

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def start(self) -> None:
        """Starts the network, the machines, the database and Slurm."""
        self._files()
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], start_new_session=True
        )
        wait_for(lambda: _apart(self._switch.pid), "a network of its own")
        for words in ("link add br0 type bridge", "link set br0 up"):
            _run("nsenter", "-t", self._switch.pid, "-n", "ip", *words.split())
        for name in NODES:
            self.add(name)
        self._database()
        self["ctl"].start("slurmctld.out", "slurmctld", "-D")
        wait_for(lambda: self.nodes().count("idle") == 2, "two idle nodes")

    def add(self, name: str) -> None:
        """Starts a machine, or one that was killed, with its daemons."""
        (self.base / "ready" / name).unlink(missing_ok=True)
        assert self._switch is not None, "started"
        machine = self.machines[name] = Machine(name, self.base)
        machine.connect(self._switch.pid)
        munge = pwd.getpwnam("munge").pw_uid
        machine.start(
            f"munged-{name}.out", *_user(munge), "munged", "-F", "--key-file=/mnt/etc/munge.key",
            "--log-file=/run/munge/log", "--pid-file=/run/munge/pid", "--seed-file=/run/munge/seed",
        )  # fmt: skip
        wait_for(lambda: machine.run("munge", "-n", check=False).returncode == 0, "munged")
        if name != "ctl":
            machine.start(f"slurmd-{name}.out", "slurmd", "-D")

    def nodes(self) -> list[str]:
        """The state of each node."""
        return self["ctl"].run("sinfo", "-hN", "-o", "%T", check=False).stdout.split()

    def end(self) -> None:
        """Ends the machines, and with them all that runs on them, and deletes their files."""
        for machine in self.machines.values():
            machine.kill()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        shutil.rmtree(self.base)

    def _files(self) -> None:
        for name in ("etc/slurm", "export/home", "log", "ready", "shared", "database", "python"):
            (self.base / name).mkdir(parents=True)
        self.base.chmod(0o755)
        etc = self.base / "etc"
        (etc / "slurm/slurm.conf").write_text(_CONF)
        (etc / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in NODES.items())
        )
        person = f"{USER}:x:{UID}:{UID}::{HOME}:/bin/bash\n"
        (etc / "passwd").write_text(Path("/etc/passwd").read_text() + person)
        (etc / "group").write_text(Path("/etc/group").read_text() + f"{USER}:x:{UID}:\n")
        (etc / "munge.key").write_bytes(secrets.token_bytes(128))
        (etc / "munge.key").chmod(0o400)
        shutil.chown(etc / "munge.key", "munge", "munge")
        home = self.base / "export/home" / USER
        files = _run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).stdout.splitlines()
        for file in files:
            if (ROOT / file).exists():
                (home / "dpsweep" / file).parent.mkdir(parents=True, exist_ok=True)
                # dpsweep/examples has links to folders of the checkout
                shutil.copy2(ROOT / file, home / "dpsweep" / file, follow_symlinks=False)
        (home / "dpsweep/.venv").symlink_to(sys.prefix)
        _run("chown", "-R", f"{UID}:{UID}", home)

    def _database(self) -> None:
        """PostgreSQL on the controller, with the user's two databases; in memory."""
        programs, data, ctl = _postgres(), Path("/run/pg"), self["ctl"]
        nobody = _user(pwd.getpwnam("nobody").pw_uid)
        (self.base / "database/password").write_text(self.password)
        ctl.run("install", "-d", "-o", "nobody", "-m", "700", data)
        ctl.run(*nobody, programs / "initdb", "-D", data, "-U", USER, "--no-sync",
                "--auth=scram-sha-256", "--pwfile=/mnt/database/password")  # fmt: skip
        access = "host all all 10.77.0.0/24 scram-sha-256"
        ctl.run("bash", "-c", f"echo '{access}' >> {data}/pg_hba.conf")
        ctl.start("postgres.out", *nobody, programs / "postgres", "-D", data, "-h", "*", "-F",
                  "-k", data)  # fmt: skip
        ready = ("pg_isready", "-h", "ctl")
        wait_for(lambda: ctl.run(*ready, check=False).returncode == 0, "PostgreSQL's answer")


def _apart(pid: int) -> bool:
    own, its = (os.readlink(f"/proc/{p}/ns/net") for p in ("self", pid))
    return own != its


@contextlib.contextmanager
def slurm() -> Iterator[Cluster]:
    """A cluster for the length of a test."""
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="dpsweep-slurm-")))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
