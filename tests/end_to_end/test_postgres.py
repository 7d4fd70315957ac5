"""A sweep whose study is in a real PostgreSQL: launched, killed, resumed, and kept apart."""

import json
import os
import subprocess

import pytest
from postgres import PASSWORD, QUOTED
from servers import command_lines, python
from waiting import wait_for

psycopg = pytest.importorskip("psycopg", reason="not here: pip install 'psycopg[binary]'")

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_study_on_a_server_survives_its_driver_and_is_not_mixed_with_another(
    tmp_path, sweep_file, dpsweep, verb, postgres
):
    rows = tmp_path / ".dpsweep/sweeps/tiny/trials/0000/metrics.json"
    long = ("--set", "train.epochs=40", "--set", "train.evaluate_every=4")
    with (tmp_path / "out").open("w") as out:
        driver = subprocess.Popen(
            python("dpsweep", "launch", sweep_file, *long),
            cwd=tmp_path,
            env={**os.environ, "DPSWEEP_STORAGE": postgres},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    wait_for(
        lambda: rows.exists() and len(json.loads(rows.read_text())) >= 2, "a second report", driver
    )
    assert not [words for words in command_lines() if QUOTED in words or PASSWORD in words]
    driver.kill()
    driver.wait()

    shown = (tmp_path / "out").read_text() + dpsweep(
        "resume", "tiny"
    )  # the storage was written down
    assert "taken over from process" in shown
    assert "0 trials finished, 2 to continue, 0 trials to run" in shown
    trials = json.loads(verb("status", "tiny", "--json"))
    assert [trial["state"] for trial in trials] == ["complete"] * 2
    assert json.loads(verb("best", "tiny", "--json"))
    assert not (tmp_path / ".dpsweep/study.db").exists()
    stored = tmp_path / ".dpsweep/sweeps/tiny/sweep.json"
    assert QUOTED in stored.read_text()
    assert stored.stat().st_mode & 0o777 == 0o600

    again = ("launch", sweep_file, "--state", "other")
    shown += dpsweep(*again, code=2, DPSWEEP_STORAGE=postgres)
    assert "already has a study called 'tiny', of another state folder" in shown
    assert not (tmp_path / "other").exists()

    stored.write_text(json.dumps({**json.loads(stored.read_text()), "id": "another"}))
    shown += verb("status", "tiny", code=2)
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
