"""What docker/Dockerfile makes, without an engine: its last stage, over this machine's root.

The root is an overlay, whose upper layer goes with the test; networks, processes and mounts are a
container's own. Two things are not as in a build: `apt-get` does nothing, for what it would bring
is here or the test is skipped; and /opt/venv is this Python's environment.
"""

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tools import DOCKER, ROOT

_TOOLS = ("unshare", "nsenter", "setpriv", "ip", "useradd", "wget")

_HOLD = """
set -e
cd "$0"
mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount -t tmpfs -o size=4g tmpfs root/dev/shm
for folder in tmp run; do mount -t tmpfs -o mode=1777 tmpfs root/$folder; done
chmod o+x root/root  # this Python may be in there
ip link set lo up
touch ready
exec chroot root bash -c 'while sleep 1; do :; done'
"""


def missing() -> str | None:
    """What this machine lacks for it; None if nothing."""
    if os.geteuid():
        return "not root, who alone may make the namespaces"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"{', '.join(absent)} not installed" if absent else None


class Container:
    """One that runs; `folder` is deleted by whoever made it, after `end`."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self._folder, self._user, self.place = folder, "0", "/"
        self.entrypoint, self.health = list[str](), list[str]()
        self._started = list[subprocess.Popen[bytes]]()
        self._environ = {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"}
        held = "--net --uts --mount --ipc --pid --fork --kill-child"
        self._holder = subprocess.Popen(
            ["unshare", *held.split(), "bash", "-c", _HOLD, str(folder)], start_new_session=True
        )
        try:
            wait_for((folder / "ready").exists, "the container is up")
            self._build()
        except BaseException:
            self.end()
            raise
        self._environ |= {"HOME": "/home/dpsweep", "PYTHONPATH": str(ROOT), **environ}

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """As `docker exec`: in WORKDIR, as USER, to its end."""
        return subprocess.run(
            self._words(command, environ), capture_output=True, text=True, check=False, timeout=900
        )

    def start(self, *command: str) -> None:
        """As `docker exec -d`: what it says, nobody sees."""
        self._started.append(
            subprocess.Popen(
                self._words(command, {}), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        )

    def end(self) -> None:
        """Kills all that runs there."""
        self._holder.kill()
        for process in (self._holder, *self._started):
            process.wait()

    def _words(self, command: tuple[str, ...], environ: dict[str, str]) -> list[str]:
        user = ["setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--clear-groups"]
        known = [f"{k}={v}" for k, v in (self._environ | environ).items()]
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        return [
            *(
                "nsenter",
                "-t",
                children.read_text().split()[0],
                "-a",
                "-r",
                "-w/",
                *user,
                "--no-new-privs",
            ),
            *("env", "-i", f"--chdir={self.place}", *known, *command),
        ]

    def _build(self) -> None:
        """The instructions behind the last FROM."""
        text = (DOCKER / "Dockerfile").read_text().rpartition("FROM ")[2]
        text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M))
        self._as_root("printf 'root:x:0:0::/root:/bin/sh\n' > /etc/passwd; : > /etc/shadow")
        self._as_root(f"printf 'root:x:0:\n' > /etc/group; ln -sfn {sys.prefix} /opt/venv")
        self._as_root("ln -sf /bin/true /usr/local/bin/apt-get")
        for line in text.splitlines()[1:]:
            name, _, rest = line.strip().partition(" ")
            match name:
                case "RUN":
                    self._as_root(rest)
                case "COPY" if not rest.startswith("--from=build"):
                    *sources, target = rest.split()
                    many = f"mkdir -p {target}; cp" if target.endswith("/") else "cp -rT"
                    files = " ".join(str(ROOT / source) for source in sources)
                    self._as_root(f"mkdir -p $(dirname {target}); {many} {files} {target}")
                case "ENV":
                    for word in shlex.split(rest):
                        key, _, value = word.partition("=")
                        self._environ[key] = value.replace("$PATH", self._environ["PATH"])
                case "WORKDIR":
                    self._as_root(f"mkdir -p {rest}")
                    self.place = rest
                case "USER":
                    self._user = rest
                case "HEALTHCHECK":
                    self.health = json.loads(rest.partition("CMD ")[2])
                case "ENTRYPOINT":
                    self.entrypoint = json.loads(rest)

    def _as_root(self, script: str) -> None:
        done = self.run("sh", "-ec", f"umask 022; {script}")
        assert done.returncode == 0, (script, done.stdout, done.stderr)


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Waits for what a test needs; fails if it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def secret() -> str:
    """A token as .env.example asks for it."""
    return secrets.token_hex(32)
