"""The scripts of docker/, run with stand-ins for what they start."""

import os
import subprocess
from pathlib import Path

import pytest
from tools import DOCKER, ROOT
from waiting import CEILING_SECONDS

TOLD = '#!/bin/sh\necho "$(basename "$0") $*"\n'


@pytest.fixture
def stand_ins(tmp_path) -> Path:
    """A folder of commands that say how they were called, first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("dpsweep", "mlflow"):
        write(folder / name, TOLD)
    return folder


def write(place: Path, text: str) -> None:
    place.write_text(text)
    place.chmod(0o755)


def call(script: str, *arguments: str, path: Path, **environ: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [DOCKER / script, *arguments],
        env={"PATH": f"{path}:{os.environ['PATH']}", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=CEILING_SECONDS,
    )


def test_first_time_launches_and_later_ones_resume(stand_ins, tmp_path):
    how = {"path": stand_ins, "DPSWEEP_STATE": str(tmp_path), "MLFLOW_TRACKING_URI": "http://h:1"}
    first = call("drive.sh", "a b.yaml", "mine", "--set", "budget.trials=4", **how)
    out, where = f"--out {tmp_path}/best/mine.yaml", f"--state {tmp_path} --address auto"
    options = "--tracking-uri http://h:1 --set budget.trials=4"
    launch = f"dpsweep launch a b.yaml --name mine {out} {options} {where}\n"
    assert first.stdout == launch
    (tmp_path / "sweeps/mine").mkdir(parents=True)
    (tmp_path / "sweeps/mine/sweep.json").write_text("{}")
    again = call("drive.sh", "a b.yaml", "mine", "--set", "budget.trials=4", **how)
    assert again.stdout == f"dpsweep resume mine {out} --wait 120 {where}\n"
    alone = call("drive.sh", "a.yaml", "mine", DPSWEEP_ADDRESS="", **how)
    assert "--address" not in alone.stdout


def test_drive_without_a_name_says_how_it_is_used(stand_ins):
    done = call("drive.sh", "a.yaml", path=stand_ins)
    assert done.returncode == 2
    assert done.stderr == "usage: drive.sh FILE NAME [OPTION...]\n"


@pytest.mark.parametrize(("code", "stops"), [(0, False), (1, True), (2, True), (75, False)])
def test_a_ray_job_stops_itself_where_a_retry_would_end_the_same_way(
    stand_ins, tmp_path, code, stops
):
    """KubeRay retries a job that failed, and not one that was stopped (rayjob_controller.go)."""
    write(stand_ins / "dpsweep", f"{TOLD}exit {code}\n")
    write(stand_ins / "ray", TOLD)
    write(stand_ins / "sleep", TOLD)
    job = '{"runtime_env": {}, "metadata": {"job_submission_id": "mine-1"}}'
    how = {"path": stand_ins, "DPSWEEP_STATE": str(tmp_path), "RAY_JOB_CONFIG_JSON_ENV_VAR": job}
    done = call("drive.sh", "a.yaml", "mine", **how)
    assert done.returncode == code
    assert ("sleep 60" in done.stdout) == stops
    stop = f"error: exit code {code}: another try would end the same way"
    assert done.stderr.startswith(stop if stops else "")


def test_entrypoint_reads_secrets_into_the_environment_and_no_argument(stand_ins, tmp_path):
    file = tmp_path / "token"
    file.write_text("a secret\n")
    show = "echo $RAY_AUTH_TOKEN,${RAY_AUTH_TOKEN_FILE-gone},$SSL_CERT_FILE; ps -o args= $$"
    done = call(
        "entrypoint.sh", "sh", "-c", show,
        path=stand_ins, RAY_AUTH_TOKEN_FILE=str(file), SSL_CERT_FILE="kept",
    )  # fmt: skip
    told, arguments = done.stdout.splitlines()
    assert told == "a secret,gone,kept"
    assert "a secret" not in arguments


@pytest.mark.parametrize("text", [None, ""])
def test_entrypoint_refuses_a_secret_that_is_not_there(stand_ins, tmp_path, text):
    file = tmp_path / "password"
    if text is not None:
        file.write_text(text)
    done = call("entrypoint.sh", "true", path=stand_ins, PGPASSWORD_FILE=str(file))
    assert done.returncode == 2
    assert done.stderr == f"error: PGPASSWORD_FILE={file}: no such file, or it is empty\n"


SERVER = {
    "MLFLOW_BACKEND_STORE_URI": "postgresql+psycopg://u@h/d",
    "MLFLOW_ARTIFACTS_DESTINATION": "s3://b",
    "MLFLOW_SERVER_ALLOWED_HOSTS": "h:5000",
    "MLFLOW_AUTH_CONFIG_PATH": "auth.ini",
    "MLFLOW_AUTH_ADMIN_PASSWORD": "a secret",
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "another",
}


def test_tracking_server_has_passwords_and_one_worker_and_says_no_secret(stand_ins):
    done = call("tracking.sh", path=stand_ins, **SERVER)
    assert done.stdout == (
        "mlflow server --app-name basic-auth --host 0.0.0.0 --port 5000 --workers 1 "
        "--serve-artifacts\n"
    )


@pytest.mark.parametrize("missing", SERVER)
def test_tracking_server_does_not_start_half_configured(stand_ins, missing):
    done = call("tracking.sh", path=stand_ins, **{**SERVER, missing: ""})
    assert (done.returncode, done.stderr) == (2, f"error: {missing} is not set\n")


# What the Slurm script asks for; tests/cluster/test_slurm.py runs it.


def submit(environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess:
    given = {
        "DPSWEEP_VENV": str(folder),
        "DPSWEEP_STATE": str(folder / "state"),
        "DPSWEEP_STORAGE": "postgresql://me@nowhere/sweeps",
        "MLFLOW_TRACKING_URI": "postgresql://me@nowhere/mlflow",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
    }
    (folder / "bin").mkdir()
    (folder / "bin/activate").touch()
    script = ["bash", DOCKER / "slurm/sweep.sbatch", "a.yaml", "mine"]
    return subprocess.run(
        script, env=given | environ, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("missing", ["DPSWEEP_STATE", "DPSWEEP_STORAGE", "MLFLOW_TRACKING_URI"])
def test_slurm_job_asks_for_what_it_needs(tmp_path, missing):
    done = submit({missing: ""}, tmp_path)
    assert done.returncode == 1
    assert missing in done.stderr


def test_slurm_job_without_a_token_says_how_to_get_one(tmp_path):
    done = submit({}, tmp_path)
    assert done.returncode == 2
    assert "Make one with: ray get-auth-token --generate" in done.stderr
