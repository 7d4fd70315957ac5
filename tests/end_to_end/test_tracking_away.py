"""A tracking server that is away keeps no trial waiting, and misses nothing when it returns."""

import json
import subprocess

import pytest
from servers import free_port, python
from tracked import tracked_runs
from waiting import CEILING_SECONDS, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_results_wait_for_the_server_over_a_restart_of_the_driver(
    tmp_path, sweep_file, dpsweep, verb, start_mlflow
):
    port = free_port()
    away, uri = start_mlflow(port), f"http://127.0.0.1:{port}"
    driver = subprocess.Popen(
        python(
            *("dpsweep", "launch", sweep_file, "--tracking-uri", uri),
            *("--set=budget.trials=4", "--set=train.epochs=10"),
        ),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    trial_dirs = tmp_path / ".dpsweep/sweeps/tiny/trials"
    wait_for(lambda: list(trial_dirs.glob("*/metrics.json")), "a first report", driver)
    away()
    shown, _ = driver.communicate(timeout=CEILING_SECONDS)
    assert driver.returncode == 0, shown
    assert "the tracking server did not take all results" in shown
    assert [t["state"] for t in json.loads(verb("status", "tiny", "--json"))] == ["complete"] * 4
    assert "wait" in dpsweep("doctor", code=1)

    start_mlflow(port)
    dpsweep("resume", "tiny")
    runs, steps = tracked_runs(uri, "tiny")
    assert sorted(runs) == ["tiny", *(f"trial-{i:04d}" for i in range(4))]
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    for name in runs:
        assert len(steps[name]) == (0 if name == "tiny" else 10)
        assert steps[name] == sorted({*steps[name]}), f"{name}: a report came twice"
