"""A tracking server that is away keeps no trial waiting, and misses nothing when it returns."""

import json
import subprocess
import sys
import time
import warnings

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_results_wait_for_the_server_over_a_restart_of_the_driver(
    tmp_path, sweep_file, dpsweep, start_mlflow, free_port
):
    away, uri = start_mlflow(free_port), f"http://127.0.0.1:{free_port}"
    driver = subprocess.Popen(
        [
            *(sys.executable, "-m", "dpsweep", "launch", str(sweep_file), "--tracking-uri", uri),
            *("--set=budget.trials=4", "--set=train.epochs=10"),
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    trial_dirs = tmp_path / ".dpsweep/sweeps/tiny/trials"
    end = time.monotonic() + 120
    while not list(trial_dirs.glob("*/metrics.json")) and time.monotonic() < end:
        time.sleep(0.1)
    away()
    shown, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, shown
    assert "the tracking server did not take all results" in shown
    assert [t["state"] for t in json.loads(dpsweep("status", "tiny", "--json"))] == ["complete"] * 4
    assert "wait" in dpsweep("doctor", code=1)

    start_mlflow(free_port)
    dpsweep("resume", "tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("tiny").experiment_id
        runs = client.search_runs([experiment])
        assert sorted(label(run) for run in runs) == [
            "tiny",
            *(f"trial-{i:04d}" for i in range(4)),
        ]
        assert {run.info.status for run in runs} == {"FINISHED"}
        for run in runs:
            history = client.get_metric_history(run.info.run_id, "valid/accuracy")
            steps = [m.step for m in history]
            assert steps == ([] if run.info.run_name == "tiny" else list(range(1, 11)))


def label(run):
    """A run's name without what is told of its config: trial-0007, or the sweep's name."""
    tag = run.data.tags.get("dpsweep.trial")
    return f"trial-{int(tag.rpartition('/')[2]):04d}" if tag else run.info.run_name
