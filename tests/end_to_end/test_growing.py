"""A sweep that was given more trials says what they cost before they run, wherever it speaks."""

import re
import subprocess
import sys
import time
import warnings

import pytest
from servers import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RAISED = "raised when results could be seen: from 1 to 6 when 1 had begun"


def test_a_driver_that_is_killed_leaves_the_statement_of_the_grown_plan_everywhere(
    tmp_path, sweep_file, dpsweep, start_mlflow
):
    port = free_port()
    start_mlflow(port)
    uri, folder = f"http://127.0.0.1:{port}", tmp_path / ".dpsweep/sweeps/tiny"
    sweep_file.write_text(sweep_file.read_text().replace("trials: 2", "trials: 1"))
    dpsweep("launch", sweep_file, "--tracking-uri", uri)
    tags, _, _ = parent(uri)
    assert "The search of 1 independent trials" in tags["mlflow.note.content"]

    sweep_file.write_text(sweep_file.read_text().replace("trials: 1", "trials: 6"))
    changed = dpsweep("resume", sweep_file, code=2)
    assert "will say that the number of runs was raised" in flat(changed)
    driver = subprocess.Popen(
        [sys.executable, "-m", "dpsweep", "resume", str(sweep_file), "--accept-changes"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 240
    while not (folder / "trials/0001").exists() and driver.poll() is None:
        assert time.monotonic() < limit, "no second trial was dispatched within 240 s"
        time.sleep(0.02)
    tags, params, status = parent(uri)  # as the first trial of the new plan is dispatched
    assert driver.poll() is None
    while not (folder / "trials/0002").exists() and driver.poll() is None:
        assert time.monotonic() < limit, "no third trial was dispatched within 240 s"
        time.sleep(0.02)
    driver.kill()
    driver.wait()

    after, _, _ = parent(uri)
    for words in (
        tags["dpsweep.privacy"],
        after["dpsweep.privacy"],
        after["mlflow.note.content"],
        (folder / "privacy.md").read_text(),
    ):
        assert "The search of all 6 planned runs" in words
        assert RAISED in words
    assert tags["dpsweep.grown"] == "from 1 to 6 when 1 had begun"
    assert (params["budget.trials"], tags["dpsweep.param.budget.trials"]) == ("1", "6")
    assert (status, tags["dpsweep.complete"]) == ("RUNNING", "false")
    told = flat(dpsweep("status", "tiny"))
    assert RAISED in told
    assert spent(told) < spent(tags["dpsweep.privacy"]), "some of the planned runs have begun"

    shown = flat(dpsweep("resume", "tiny"))
    assert RAISED in shown
    tags, _, status = parent(uri)
    assert status == "FINISHED"
    assert RAISED in tags["mlflow.note.content"]
    assert spent(tags["dpsweep.privacy"]) == spent(after["dpsweep.privacy"])
    assert RAISED in (folder / "privacy.md").read_text()
    assert RAISED in (folder / "report.html").read_text()
    assert RAISED in flat(dpsweep("best", "tiny"))
    dpsweep("export", "tiny", "-o", "best")
    (exported,) = (tmp_path / "best").iterdir()
    assert RAISED in flat(exported.read_text().replace("#", ""))
    assert not (folder / "spool.refused.jsonl").exists()


def parent(uri):
    """Tags, params and status of the sweep's run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("tiny").experiment_id
        (run,) = client.search_runs([experiment], filter_string="tags.dpsweep.sweep = 'tiny'")
    return run.data.tags, run.data.params, run.info.status


def spent(words):
    """The composed epsilon of a statement."""
    return float(re.search(r"among them: \(([\d.]+), ", words)[1])


def flat(text):
    """On one line: terminals and exports wrap."""
    return " ".join(text.split())
