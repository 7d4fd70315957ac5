"""A PostgreSQL server of a test's own, with a password that has to be quoted in a URL."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from servers import answers, free_port
from waiting import CEILING_SECONDS, wait_for

PASSWORD = "pa55:word/@"
QUOTED = "pa55%3Aword%2F%40"


def programs() -> Path:
    """Folder of initdb and postgres; skips the test where there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    place = shutil.which("initdb") or (found[-1] if found else None)
    if place is None:
        pytest.skip("no PostgreSQL server here: apt-get install postgresql")
    return Path(place).parent


@contextmanager
def postgres_server() -> Iterator[str]:
    """A server on a free port; its URL, with the password in it."""
    binaries = programs()
    # It refuses to run as root.
    who = {} if os.getuid() else {"user": "nobody", "group": "nogroup", "extra_groups": []}
    folder = Path(tempfile.mkdtemp(prefix="dpsweep-pg-"))
    if who:
        shutil.chown(folder, who["user"], who["group"])
    (folder / "password").write_text(PASSWORD)
    (folder / "password").chmod(0o644)
    try:
        made = subprocess.run(
            [
                *(binaries / "initdb", "-D", folder / "data", "-U", "sweeper", "--no-sync"),
                *("--auth=scram-sha-256", "--pwfile", folder / "password"),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            **who,
        )
        if made.returncode:
            pytest.skip(f"initdb cannot be run here: {made.stderr.strip()}")
        port = free_port()
        server = subprocess.Popen(
            [binaries / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, "-F"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            **who,
        )
        wait_for(lambda: answers(port), "PostgreSQL's answer", server)
        yield f"postgresql://sweeper:{QUOTED}@127.0.0.1:{port}/postgres"
        server.send_signal(signal.SIGINT)
        server.wait(CEILING_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
