"""`doctor` finds what is wrong, says what to do, and exits with 1 only if something fails."""

import json
import socket
import sqlite3
import subprocess
import sys
import threading
from base64 import b64encode
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from dpsweep.cli import app
from dpsweep.cli.verbs import doctor as doctor_verb
from dpsweep.cli.verbs.doctor.context import DoctorContext
from dpsweep.cli.verbs.doctor.elsewhere import ray_access
from dpsweep.config.sweep import load_sweep
from dpsweep.store import filesystem as mounts
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study
from dpsweep.tracking.spool import Spool


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("DPSWEEP_STORAGE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return StateFolder(tmp_path / ".dpsweep")


@pytest.fixture
def launch(state, sweep_file):
    def make(name="tiny", tracking=None, storage=None):
        sweep = load_sweep(sweep_file, [f"name={name}"])
        folder = state.sweep(name)
        folder.create(sweep.file, sweep.base, tracking, storage)
        if storage is None:
            Study.create(folder.storage_uri, sweep, folder.id)
        return folder

    return make


def doctor(*args, code=0):
    """What was not fine, as {check: (level, words)}; later findings of a check replace earlier."""
    result = CliRunner().invoke(app, ["doctor", "--json", *args])
    assert result.exit_code == code, result.output
    rows = json.loads(result.output)
    return {r["check"]: (r["level"], f"{r['words']} {r['remedy']}") for r in rows}, rows


def test_a_new_folder_is_healthy_and_stays_unmade(state):
    found, rows = doctor()
    assert {row["level"] for row in rows} == {"ok"}
    assert "torch" in found["versions"][1]
    assert not state.root.exists()


def test_people_get_a_table_with_the_remedies(state, launch):
    (launch().path / "ray").mkdir()
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "150"})
    assert result.exit_code == 0
    assert "warn" in result.output
    assert "See them with: dpsweep gc" in result.output


def test_a_sweep_whose_study_is_gone_fails(state, launch):
    launch()
    for file in state.root.glob("study.db*"):
        file.unlink()
    found, _ = doctor(code=1)
    assert found["storage"][0] == "fail"
    assert "Restore it: it alone knows what the trials have spent" in found["storage"][1]
    assert not (state.root / "study.db").exists()


def test_a_study_of_another_folder_fails(state, launch):
    stored = launch("two").path / "sweep.json"
    launch("one")
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "id": "another"}))
    found, _ = doctor(code=1)
    assert found["sweep one"][0] == "ok"
    assert found["sweep two"][0] == "fail"
    assert "belongs to a sweep of another state folder" in found["sweep two"][1]


def test_a_storage_that_fails_is_shown_without_its_password(state, launch):
    launch(storage="mysql+nodriver://me:secret@h/db")
    found, rows = doctor(code=1)
    assert "needs the driver nodriver" in found["storage"][1]
    assert "secret" not in json.dumps(rows)
    named, _ = doctor("--storage", "postgresql+nodriver://h/db", code=1)
    assert "postgresql+nodriver" in named["storage"][1]


def test_a_newer_schema_fails(state, launch):
    launch()
    with closing(sqlite3.connect(state.root / "study.db")) as file:
        file.execute("UPDATE alembic_version SET version_num = 'v99.0.0.a'")
        file.commit()
    assert "a newer Optuna" in doctor(code=1)[0]["storage"][1]


def test_a_tracking_server_that_is_away_fails(state, launch):
    launch(tracking="http://me:secret@127.0.0.1:9")
    found, rows = doctor(code=1)
    assert "nothing answers there" in found["tracking"][1]
    assert "secret" not in json.dumps(rows)


def test_what_waits_and_what_was_refused_is_told(state, launch):
    spool = Spool(launch().path)
    spool.append({"n": 1})
    found, _ = doctor()
    assert found["sweep tiny"][0] == "warn"
    assert "1 entries wait for the tracking server" in found["sweep tiny"][1]
    spool.refuse({"n": 1}, "too long")
    assert "refused 1 entries, the last one: too long" in doctor()[0]["sweep tiny"][1]


def test_a_dead_driver_is_told_from_a_living_one(state, launch):
    hold = "import sys; from pathlib import Path; from dpsweep.store.lease import hold_lease\n"
    hold += "with hold_lease(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    driver = subprocess.Popen(
        [sys.executable, "-c", hold, str(launch().path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    driver.stdout.readline()
    assert f"driven by process {driver.pid}" in doctor()[0]["sweep tiny"][1]
    driver.kill()
    driver.communicate()
    found = doctor()[0]["sweep tiny"]
    assert found[0] == "warn"
    assert f"process {driver.pid} on " in found[1]
    assert "died Go on with: dpsweep resume tiny" in found[1]


def test_a_shared_file_system_is_warned_of(state, tmp_path, monkeypatch):
    listing = tmp_path / "mounts"
    listing.write_text(f"server:/x {tmp_path.resolve()} nfs rw 0 0\n")
    monkeypatch.setattr(mounts, "MOUNTS", listing)
    found, rows = doctor()
    assert [row["level"] for row in rows if row["check"] == "state"] == ["ok", "warn"]
    assert "nfs is shared between machines" in found["state"][1]


def test_little_room_is_warned_of(state, monkeypatch):
    monkeypatch.setattr(doctor_verb, "free_bytes", lambda _: 5_000_000)
    assert doctor()[0]["disk"] == ("warn", "5.0 MB are free See what can go with: dpsweep gc")


def test_a_folder_that_cannot_be_written_fails(state, tmp_path):
    (tmp_path / "file").write_text("")
    found, _ = doctor("--state", "file/state", code=1)
    assert "is not a folder" in found["state"][1]


def test_what_others_can_reach_is_told_with_the_command_that_mends_it(state, launch):
    trial_dir = launch().trial_dir(0)
    trial_dir.mkdir(mode=0o700)
    (trial_dir / "secret").write_bytes(b"x")
    (trial_dir / "secret").chmod(0o640)
    found, _ = doctor(code=1)
    assert found["permissions"][0] == "fail"
    assert str(trial_dir / "secret") in found["permissions"][1]
    assert "chmod -R go= " in found["permissions"][1]
    (trial_dir / "secret").chmod(0o600)
    assert doctor()[0]["permissions"] == ("ok", "what is private here is its owner's alone ")
    state.root.chmod(0o750)
    _, rows = doctor()
    assert "can be read by others (mode 0750)" in str(rows)
    state.root.chmod(0o775)
    _, rows = doctor(code=1)
    assert "can be written by others (mode 0775)" in str(rows)


def test_a_token_that_others_can_read_is_warned_of(state, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("t")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    assert doctor()[0]["credentials"] == (
        "warn",
        f"{token} holds tokens or passwords, and its mode is 0644 chmod 600 {token}",
    )
    token.chmod(0o600)
    assert doctor()[0]["credentials"][0] == "ok"


def test_what_up_and_submit_keep_is_to_be_its_owners_alone(state):
    for name in ("local/ray_token", "submitted/tiny.json"):
        place = state.root / name
        place.parent.mkdir(parents=True, mode=0o700)
        place.write_text("x")
        place.chmod(0o600)
    state.root.chmod(0o700)
    _, rows = doctor()
    assert not [row for row in rows if row["level"] != "ok"]
    place.chmod(0o644)
    told, _ = doctor()
    assert told["credentials"][0] == "warn"
    assert f"{place} tells how to reach a cluster, and its mode is 0644" in told["credentials"][1]


@pytest.mark.slow
def test_what_listens_and_is_no_cluster_is_told(state):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        said = list(ray_access(DoctorContext(state, None, address)))[-1]
    assert (said.level, said.words) == (
        "fail",
        f"{address} listens, and does not answer as a Ray cluster does",
    )


def test_a_cluster_that_is_away_fails(state):
    found, _ = doctor("--address", "127.0.0.1:9", code=1)
    assert "nothing answers there" in found["ray"][1]


class Server(BaseHTTPRequestHandler):
    """As much of MLflow's REST interface as doctor asks; its rights are the class's."""

    password = ""
    artifacts = "mlflow-artifacts:/0"

    def answer(self):
        given = self.headers.get("Authorization", "")
        wanted = "Basic " + b64encode(f"me:{self.password}".encode()).decode()
        open_ = not self.password or self.path == "/health" or given == wanted
        body = json.dumps({"experiment": {"artifact_location": self.artifacts}}).encode()
        self.send_response(200 if open_ else 401)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("password", ["", "pa55"])
def test_a_server_is_asked_whether_it_lets_anybody_in(state, monkeypatch, password):
    kind = type("Given", (Server,), {"password": password})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = ("--tracking-uri", f"http://127.0.0.1:{server.server_port}")
        if password:
            assert "wants a name and a password" in doctor(*asked, code=1)[0]["tracking"][1]
            monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
            monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        found, rows = doctor(*asked)
        assert ("lets anybody in" in str(rows)) == (not password)
        assert found["artifacts"][0] == "ok"
        kind.artifacts = "/srv/artifacts"
        assert "a folder that only the same machine has" in doctor(*asked)[0]["artifacts"][1]
        assert "pa55" not in str(rows)
        server.shutdown()
