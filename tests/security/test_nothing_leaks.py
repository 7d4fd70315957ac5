"""A real sweep with every kind of secret, and a search for each of them everywhere it could be."""

import base64
import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

_PLACE = Path(__file__).parents[1] / "end_to_end/test_postgres.py"
_SPEC = importlib.util.spec_from_file_location("with_postgres", _PLACE)
with_postgres = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(with_postgres)
postgres = with_postgres.postgres

SETTINGS = ("--set", "train.epochs=40", "--set", "train.evaluate_every=4")


@pytest.fixture
def server(tmp_path):
    """An MLflow server that is asked with a password; its folder and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "server"
    folder.mkdir()
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{folder}/server.db"),
            *("--artifacts-destination", str(folder / "artifacts")),
        ],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with_postgres.wait_for(lambda: with_postgres.answers(port), "MLflow's answer", 300)
    yield folder, f"http://127.0.0.1:{port}"
    os.killpg(process.pid, 15)
    process.wait(30)
    log.close()


def forms(secret):
    """A secret as bytes may be written down."""
    yield secret
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    yield base64.b64encode(secret)
    yield repr(secret)[2:-1].encode()


def found(places, words):
    """(file, which secret) for every file under `places` that holds one."""
    for top in places:
        for place in [top, *top.rglob("*")]:
            with contextlib.suppress(OSError):
                if place.is_file() and not place.is_symlink():
                    content = place.read_bytes()
                    yield from ((place, what) for what, word in words if word in content)


def test_no_secret_is_anywhere_but_in_its_own_place(tmp_path, sweep_file, postgres, server):
    folder, uri = server
    home, temporary = tmp_path / "home", Path(tempfile.mkdtemp(prefix="dl-", dir="/tmp"))
    home.mkdir()
    passwords = {
        "tracking": secrets.token_hex(16),
        "storage": with_postgres.PASSWORD,
        "token": secrets.token_hex(24),
    }
    words = [(name, value.encode()) for name, value in passwords.items()]
    words.append(("storage", with_postgres.QUOTED.encode()))
    at = urlsplit(postgres)
    trial_dirs, drawn, leaks = tmp_path / ".dpsweep/sweeps/tiny/trials", {}, set()
    output = (tmp_path / "out").open("wb")
    driver = subprocess.Popen(
        [
            *(sys.executable, "-m", "dpsweep", "launch", sweep_file, *SETTINGS),
            *("--storage", f"postgresql://{at.username}@{at.hostname}:{at.port}{at.path}"),
            *("--tracking-uri", uri),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "MLFLOW_TRACKING_USERNAME": "me",
            "MLFLOW_TRACKING_PASSWORD": passwords["tracking"],
            "PGPASSWORD": passwords["storage"],
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": passwords["token"],
        },
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    looked = 0
    try:
        end = time.monotonic() + 500
        while driver.poll() is None:
            assert time.monotonic() < end, (tmp_path / "out").read_text()
            for place in trial_dirs.glob("*/secret"):
                with contextlib.suppress(OSError):
                    drawn[place] = place.read_bytes()[1:]
            trials = [(f"secret {p}", form) for p, key in drawn.items() for form in forms(key)]
            for line in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    said = line.read_bytes()
                    leaks |= {("argv", said, what) for what, word in words + trials if word in said}
            leaks |= set(found([temporary], words + trials))  # Ray's logs go when it ends
            looked += any(temporary.rglob("*.log")) or any(temporary.rglob("*.out"))
            time.sleep(0.3)
    finally:
        driver.kill()
        driver.wait()
        output.close()
        shutil.rmtree(temporary, ignore_errors=True)
    shown = (tmp_path / "out").read_text()
    assert driver.returncode == 0, shown
    assert len(drawn) == 2, "each trial's secret was seen in its directory"
    assert looked > 3, "Ray's logs were looked at"
    trials = [(f"secret {p}", form) for p, key in drawn.items() for form in forms(key)]
    everywhere = [tmp_path / ".dpsweep", folder, home, tmp_path / "out", tmp_path / "best.yaml"]
    assert all(place.exists() for place in everywhere)
    leaks |= set(found(everywhere, words + trials))
    assert leaks == set()
    assert list(found([folder], [("a sweep's name", b"tiny")])), "the search can find things"
    assert not list(trial_dirs.glob("*/secret"))
