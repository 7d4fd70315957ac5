"""A sweep whose study is in a real PostgreSQL: launched, killed, resumed, and kept apart."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

psycopg = pytest.importorskip("psycopg", reason="not here: pip install 'psycopg[binary]'")

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PASSWORD = "pa55:word/@"
QUOTED = "pa55%3Aword%2F%40"


def binaries():
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    place = shutil.which("initdb") or (found[-1] if found else None)
    return Path(place).parent if place else None


def unprivileged():
    """Arguments for subprocess: PostgreSQL refuses to run as root."""
    if os.getuid():
        return {}
    return {"user": "nobody", "group": "nogroup", "extra_groups": []}


@pytest.fixture(scope="module")
def postgres():
    """A server of our own on a free port; its URL, with the password in it."""
    if (programs := binaries()) is None:
        pytest.skip("no PostgreSQL server here: apt-get install postgresql")
    folder, who = Path(tempfile.mkdtemp(prefix="dpsweep-pg-")), unprivileged()
    if who:
        shutil.chown(folder, who["user"], who["group"])
    (folder / "password").write_text(PASSWORD)
    (folder / "password").chmod(0o644)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        made = subprocess.run(
            [
                *(programs / "initdb", "-D", folder / "data", "-U", "sweeper", "--no-sync"),
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
        server = subprocess.Popen(
            [programs / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, "-F"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            **who,
        )
        wait_for(lambda: answers(port), "PostgreSQL's answer")
        yield f"postgresql://sweeper:{QUOTED}@127.0.0.1:{port}/postgres"
        server.send_signal(signal.SIGINT)
        server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_study_on_a_server_survives_its_driver_and_is_not_mixed_with_another(
    tmp_path, sweep_file, dpsweep, postgres
):
    rows = tmp_path / ".dpsweep/sweeps/tiny/trials/0000/metrics.json"
    driver = subprocess.Popen(
        [
            *(sys.executable, "-m", "dpsweep", "launch", sweep_file),
            *("--set", "train.epochs=40", "--set", "train.evaluate_every=4"),
        ],
        cwd=tmp_path,
        env={**os.environ, "DPSWEEP_STORAGE": postgres},
        stdout=(tmp_path / "out").open("w"),
        stderr=subprocess.STDOUT,
    )
    wait_for(lambda: rows.exists() and len(json.loads(rows.read_text())) >= 2, "a second report")
    assert not [words for words in command_lines() if QUOTED in words or PASSWORD in words]
    driver.kill()
    driver.wait()

    shown = (tmp_path / "out").read_text() + dpsweep(
        "resume", "tiny"
    )  # the storage was written down
    assert "taken over from process" in shown
    assert "0 trials finished, 2 adopted, 0 to run" in shown
    trials = json.loads(dpsweep("status", "tiny", "--json"))
    assert [trial["state"] for trial in trials] == ["complete"] * 2
    assert json.loads(dpsweep("best", "tiny", "--json"))
    assert not (tmp_path / ".dpsweep/study.db").exists()
    stored = tmp_path / ".dpsweep/sweeps/tiny/sweep.json"
    assert QUOTED in stored.read_text()
    assert stored.stat().st_mode & 0o777 == 0o600

    again = ("launch", sweep_file, "--state", "other")
    shown += dpsweep(*again, code=2, DPSWEEP_STORAGE=postgres)
    assert "already has a study called 'tiny', of another state folder" in shown
    assert not (tmp_path / "other").exists()

    stored.write_text(json.dumps({**json.loads(stored.read_text()), "id": "another"}))
    shown += dpsweep("status", "tiny", code=2)
    assert "'tiny' belongs to a sweep of another state folder" in shown
    assert PASSWORD not in shown
    assert QUOTED not in shown


def test_runs_are_tracked_in_a_database_of_their_own_with_artifacts_beside_the_state(
    tmp_path, sweep_file, dpsweep, postgres
):
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("CREATE DATABASE mlflow")
    server = {"DPSWEEP_STORAGE": postgres, "PGPASSWORD": PASSWORD}
    port = postgres.rpartition(":")[2].partition("/")[0]
    of = f"postgresql://sweeper@127.0.0.1:{port}/"
    named = ("launch", sweep_file, "--name", "tracked", "--tracking-uri")
    shown = dpsweep(*named, f"{of}postgres", code=2, **server)
    assert "is the study's database as well (--storage), and MLflow needs one of its own" in shown
    shown = dpsweep(*named, f"{of}mlflow", **server)
    assert "MLflow: postgresql+psycopg://sweeper@127.0.0.1" in shown
    assert "INFO" not in shown, "of MLflow's tables"
    assert not (tmp_path / ".dpsweep/mlflow.db").exists()
    assert [*(tmp_path / ".dpsweep/artifacts/tracked").glob("*/artifacts/best.yaml")]
    with psycopg.connect(f"{postgres.removesuffix('postgres')}mlflow") as connection:
        states = connection.execute("SELECT status FROM runs").fetchall()
    assert states == [("FINISHED",)] * 3
    assert "wait in" not in dpsweep("resume", "tracked", **server), "told again, nothing is refused"


def test_a_wrong_password_is_told_without_any_password(tmp_path, sweep_file, dpsweep, postgres):
    wrong = postgres.replace(QUOTED, "wrong")
    shown = dpsweep("launch", sweep_file, code=2, DPSWEEP_STORAGE=wrong)
    assert "password authentication failed" in shown
    assert "sweeper:***@127.0.0.1" in shown
    assert ":wrong@" not in shown
    assert not (tmp_path / ".dpsweep").exists()


def command_lines():
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield place.read_text(errors="replace")


def wait_for(condition, what, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)


def answers(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0
