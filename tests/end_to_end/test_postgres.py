"""A sweep whose study is in a real PostgreSQL: launched, killed, resumed, and kept apart."""

import json
import os
import subprocess

import pytest
from postgres import PASSWORD, QUOTED
from servers import command_lines, python
from waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_study_on_a_server_survives_its_driver_and_is_not_mixed_with_another(
    tmp_path, sweep_file, dpsweep, verb, postgres
):
    rows = tmp_path / ".dpsweep/sweeps/tiny/trials/0000/metrics.json"
    driver = subprocess.Popen(
        python(
            *("dpsweep", "launch", sweep_file),
            *("--set", "train.epochs=40", "--set", "train.evaluate_every=4"),
        ),
        cwd=tmp_path,
        env={**os.environ, "DPSWEEP_STORAGE": postgres},
        stdout=(tmp_path / "out").open("w"),
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
    assert "0 trials finished, 2 adopted, 0 to run" in shown
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


def test_a_wrong_password_is_told_without_any_password(tmp_path, sweep_file, dpsweep, postgres):
    wrong = postgres.replace(QUOTED, "wrong")
    shown = dpsweep("launch", sweep_file, code=2, DPSWEEP_STORAGE=wrong)
    assert "password authentication failed" in shown
    assert "sweeper:***@127.0.0.1" in shown
    assert ":wrong@" not in shown
    assert not (tmp_path / ".dpsweep").exists()
