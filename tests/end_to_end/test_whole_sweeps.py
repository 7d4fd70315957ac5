"""Whole sweeps, through real Ray, Optuna and MLflow, as a user runs them."""

import json
import os
import re
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from servers import answers, end_group, free_port, python, start_mlflow
from tracked import tracked_runs
from waiting import CEILING_SECONDS, wait_for

from dpsweep import resume
from dpsweep.config.source import read_yaml
from dpsweep.config.trial import load_trial
from dpsweep.core.errors import StateError

ROOT = Path(__file__).parents[2]
SECRET = {"DPSWEEP_TEST_SECRET": "end to end"}

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_resume_after_kill_loses_nothing_and_each_trial_can_be_trained_again(
    tmp_path, sweep_file, dpsweep, verb
):
    state, rows = tmp_path / ".dpsweep", tmp_path / ".dpsweep/sweeps/tiny/trials/0000/metrics.json"
    long = ["--set", "train.epochs=40", "--set", "train.evaluate_every=4"]
    driver = subprocess.Popen(
        python("dpsweep", "launch", sweep_file, *long),
        cwd=tmp_path,
        env={**os.environ, **SECRET},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(
        lambda: rows.exists() and len(json.loads(rows.read_text())) >= 2, "a second report", driver
    )
    driver.kill()
    driver.wait()
    before = json.loads(verb("status", "tiny", "--json"))
    assert {trial["state"] for trial in before} == {"interrupted"}

    shown = dpsweep("resume", "tiny", **SECRET)
    assert "tiny: 0 trials finished, 2 to continue, 0 trials to run" in shown

    after = json.loads(verb("status", "tiny", "--json"))
    assert [trial["state"] for trial in after] == ["complete"] * 2
    runs, steps = tracked_runs(f"sqlite:///{state}/mlflow.db", "tiny")
    assert {name: run.info.status for name, run in runs.items()} == {
        "tiny": "FINISHED",
        "trial-0000": "FINISHED",
        "trial-0001": "FINISHED",
    }
    for trial in after:
        found = steps[f"trial-{trial['trial']:04d}"]
        assert (len(found), found[-1]) == (10, trial["step"])
        assert found == sorted({*found}), "a report came twice"
    assert "VOID" in runs["trial-0000"].data.tags["mlflow.note.content"]

    verb("export", "tiny", "--top", "2", "-o", "best")
    for place in sorted((tmp_path / "best").iterdir()):
        number = place.stem[-4:]
        dpsweep("train", place, "-q", "-o", f"again-{number}", **SECRET)
        one = torch.load(state / f"sweeps/tiny/trials/{number}/weights.pt", weights_only=True)
        two = torch.load(tmp_path / f"again-{number}/weights.pt", weights_only=True)
        assert all(torch.equal(one[k], two[k]) for k in one)
    assert not list(state.glob("sweeps/*/trials/*/secret"))
    assert not list(state.glob("sweeps/*/trials/*/checkpoint.pt"))


def test_quickstart_finds_a_good_config_and_exports_it(tmp_path, dpsweep, verb):
    # The file asks for 6 exploring trials, which differ from these in number and noise alone.
    few = ("--set", "budget.explore.trials=3")
    shown = dpsweep("launch", ROOT / "sweeps/quickstart.yaml", *few)
    assert "[4/4]" in shown
    sentence = r"The best model for one epsilon, the search included: ε 4\.00 \(δ 3\.4e-04\)\. "
    assert re.search(sentence + r"Trial 3 alone: ε 3\.\d+", shown)
    assert "Browse the trials in MLflow:" in shown
    best = json.loads(verb("best", "quickstart", "--top", "1", "--json"))[0]
    # 360 test images: a binomial standard deviation of 0.015 around the 0.93 to 0.95 that is usual
    assert best["valid/accuracy"] > 0.87
    assert 3.7 < best["privacy/epsilon_spent"] < 4
    assert best["trial"] == 3, "the final run"
    assert best["choice"].startswith("Chosen as observed: 3 complete trials are fewer than the 12")
    exported = load_trial(read_yaml(tmp_path / "best.yaml"))
    assert exported.method.kappa == best["hyperparams"]["method.kappa"]
    runs, _ = tracked_runs(f"sqlite:///{tmp_path}/.dpsweep/mlflow.db", "quickstart")
    assert len(runs) == 5, "3 exploring trials, the final run and the sweep"
    assert (tmp_path / ".dpsweep/sweeps/quickstart/trials/0003/weights.pt").exists()
    notes = [run.data.tags["mlflow.note.content"] for run in runs.values()]
    assert all("differentially private" in note for note in notes)
    parent = runs["quickstart"].info.run_id
    children = [run for name, run in runs.items() if name != "quickstart"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent}
    again = verb("launch", ROOT / "sweeps/quickstart.yaml", code=2)
    assert "a sweep called 'quickstart' is already in" in again


@pytest.fixture
def ray_head():
    """A Ray cluster that is there already; its address."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="r-") as folder:  # short: it holds sockets
        head = subprocess.Popen(
            python(
                "ray.scripts.scripts",
                *("start", "--head", "--block", "--port", port, "--num-cpus", 2),
                *("--temp-dir", folder, "--include-dashboard=false", "--disable-usage-stats"),
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for(lambda: answers(port), "Ray's answer", head)
        yield f"127.0.0.1:{port}"
        end_group(head)


@pytest.fixture
def tracking_server(tmp_path):
    """A real MLflow server; its URI."""
    port = free_port()
    server = start_mlflow(tmp_path, port)
    yield f"http://127.0.0.1:{port}"
    end_group(server)


def test_sweep_on_running_services_stops_on_request_and_resumes_with_its_failures(
    tmp_path, sweep_file, dpsweep, verb, ray_head, tracking_server, monkeypatch
):
    services = ["--address", ray_head, "--tracking-uri", tracking_server]
    space = "search={optimizer.lr: {choice: [1.0, 3.0e+38]}}"  # one of which diverges
    settings = [space, "budget.trials=4", "sampler.name=qmc", "train.epochs=12"]
    driver = subprocess.Popen(
        python(
            *("dpsweep", "launch", sweep_file, *services),
            *(f"--set={setting}" for setting in settings),
        ),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    second = tmp_path / ".dpsweep/sweeps/tiny/trials/0001"
    wait_for(second.exists, "the second trial", driver)
    verb("stop", "tiny", "--wait", int(CEILING_SECONDS))
    out, _ = driver.communicate(timeout=CEILING_SECONDS)
    assert driver.returncode == 130, out
    assert "Stopped. Go on with:" in out

    dpsweep("resume", "tiny", "--address", ray_head)
    trials = json.loads(verb("status", "tiny", "--json"))
    assert len(trials) == 4
    ends = {(trial["hyperparams"]["optimizer.lr"], trial["state"]) for trial in trials}
    assert ends == {(1.0, "complete"), (3e38, "failed")}
    reasons = [trial["reason"] for trial in trials if trial["state"] == "failed"]
    assert all("stopped being finite by epoch 1" in reason for reason in reasons)

    # As if it were somebody else's sweep, and one of which no trial is completed.
    namesake, none = ("--state", "other"), "search={optimizer.lr: {choice: [2.0e+38, 3.0e+38]}}"
    shown = dpsweep("launch", sweep_file, *services, *namesake, "--set", none, "-q", code=1)
    words = r"sweep 'tiny' is finished, and no trial was completed: 2 failed, the last one with: "
    again = r".*dpsweep status tiny --state other\n"
    assert re.fullmatch(rf"error: {words}.* finite by epoch 1.* See: {again}", shown)
    said = verb("resume", "tiny", *namesake, code=1)
    assert re.search(words, said), "asked again, it says so again"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StateError, match=rf"{words}.*See: dpsweep.open\('tiny'.*\).trials$"):
        resume("tiny", state="other", quiet=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(tracking_server)
        experiment = client.get_experiment_by_name("tiny").experiment_id
        runs = client.search_runs([experiment])
    parents = [run for run in runs if run.info.run_name == "tiny"]
    assert (len(runs), len(parents)) == (8, 2), "two sweeps of one name have runs of their own"
    failed = 2 + sum(trial["state"] == "failed" for trial in trials)
    statuses = sorted(run.info.status for run in runs)
    assert statuses == ["FAILED"] * failed + ["FINISHED"] * (8 - failed)
    stored = [{a.path for a in client.list_artifacts(run.info.run_id)} for run in parents]
    always = {"privacy.md", "release-checks.md", "sweep.yaml"}
    found = {"best.yaml", "confusion.csv", "report.html"}
    assert sorted(stored, key=len) == [always, always | found]
    assert not (tmp_path / ".dpsweep/mlflow.db").exists()


@pytest.mark.slow
def test_fashion_mnist_from_a_torchvision_folder(tmp_path, dpsweep, verb):
    root = os.environ.get("DPSWEEP_TEST_DATA")
    if not root:
        pytest.skip("set DPSWEEP_TEST_DATA to a folder with FashionMNIST/raw in it")
    small = ["--set", f"data.root={root}", "--set", "budget.trials=2", "--set", "train.epochs=1"]
    dpsweep("launch", ROOT / "sweeps/fashion_mnist_fftkf.yaml", *small)
    best = json.loads(verb("best", "fashion-mnist-fftkf", "--json"))
    # One epoch at epsilon 4; always guessing one class would reach 0.1.
    assert best[0]["valid/accuracy"] > 0.4
