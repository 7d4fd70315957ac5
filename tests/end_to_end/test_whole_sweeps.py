"""Whole sweeps, through real Ray, Optuna and MLflow, as a user runs them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from dpsweep.config.source import read_yaml
from dpsweep.config.trial import load_trial

ROOT = Path(__file__).parents[2]
SECRET = {"DPSWEEP_TEST_SECRET": "end to end"}

pytestmark = pytest.mark.ray


def runs_of(uri, sweep):
    """Every MLflow run of a sweep by name, with the epochs of its accuracies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(sweep).experiment_id
        runs = client.search_runs([experiment], max_results=500)
        epochs = {
            label(run): [
                m.step for m in client.get_metric_history(run.info.run_id, "valid/accuracy")
            ]
            for run in runs
        }
        names = [label(run) for run in runs]
        assert len(names) == len(set(names)), "a trial has two runs"
        return {label(run): run for run in runs}, epochs


def label(run):
    """A run's name without what is told of its config: trial-0007, or the sweep's name."""
    tag = run.data.tags.get("dpsweep.trial")
    return f"trial-{int(tag.rpartition('/')[2]):04d}" if tag else run.info.run_name


def wait_for(condition, what, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_driver_loses_nothing_and_each_trial_can_be_trained_again(
    tmp_path, sweep_file, dpsweep
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
    wait_for(lambda: rows.exists() and len(json.loads(rows.read_text())) >= 2, "a second report")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = json.loads(dpsweep("status", "tiny", "--json"))
    assert {trial["state"] for trial in before} == {"interrupted"}

    shown = dpsweep("resume", "tiny", **SECRET)
    assert "tiny: 0 trials finished, 2 adopted, 0 to run" in shown

    after = json.loads(dpsweep("status", "tiny", "--json"))
    assert [trial["state"] for trial in after] == ["complete"] * 2
    runs, epochs = runs_of(f"sqlite:///{state}/mlflow.db", "tiny")
    assert {name: run.info.status for name, run in runs.items()} == {
        "tiny": "FINISHED",
        "trial-0000": "FINISHED",
        "trial-0001": "FINISHED",
    }
    assert epochs["trial-0000"] == epochs["trial-0001"] == list(range(4, 41, 4))
    assert "VOID" in runs["trial-0000"].data.tags["mlflow.note.content"]

    dpsweep("export", "tiny", "--top", "2", "-o", "best")
    for place in sorted((tmp_path / "best").iterdir()):
        number = place.stem[-4:]
        dpsweep("train", place, "-q", "-o", f"again-{number}", **SECRET)
        one = torch.load(state / f"sweeps/tiny/trials/{number}/weights.pt", weights_only=True)
        two = torch.load(tmp_path / f"again-{number}/weights.pt", weights_only=True)
        assert all(torch.equal(one[k], two[k]) for k in one)
    assert not list(state.glob("sweeps/*/trials/*/secret"))
    assert not list(state.glob("sweeps/*/trials/*/checkpoint.pt"))


def test_a_trial_that_diverges_fails_with_its_reason_and_a_stopped_sweep_goes_on(
    tmp_path, sweep_file, dpsweep
):
    space = "search={optimizer.lr: {choice: [1.0, 3.0e+38]}}"
    settings = [space, "budget.trials=6", "sampler.name=qmc", "train.epochs=12"]
    driver = subprocess.Popen(
        python("dpsweep", "launch", sweep_file, *(f"--set={setting}" for setting in settings)),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    study = tmp_path / ".dpsweep/sweeps/tiny/trials/0001"
    wait_for(study.exists, "the second trial")
    dpsweep("stop", "tiny")
    out, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert "Stopped. Go on with:" in out
    dpsweep("resume", "tiny")
    trials = json.loads(dpsweep("status", "tiny", "--json"))
    assert len(trials) == 6
    ends = {(trial["knobs"]["optimizer.lr"], trial["state"]) for trial in trials}
    assert ends == {(1.0, "complete"), (3e38, "failed")}
    reasons = [trial["reason"] for trial in trials if trial["state"] == "failed"]
    assert all("stopped being finite by epoch 1" in reason for reason in reasons)


def test_a_sweep_without_a_complete_trial_ends_with_1_and_says_why(tmp_path, sweep_file, dpsweep):
    space = "search={optimizer.lr: {choice: [2.0e+38, 3.0e+38]}}"
    shown = dpsweep("launch", sweep_file, "--set", space, "-q", code=1)
    words = r"sweep 'tiny' is finished, and no trial was completed: 2 failed, the last one with: "
    assert re.fullmatch(
        rf"error: {words}.* finite by epoch 1.* See: .*dpsweep status tiny\n", shown
    )
    assert re.search(words, dpsweep("resume", "tiny", code=1)), "asked again, it says so again"
    script = "import dpsweep; dpsweep.resume('tiny', quiet=True)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert re.search(rf"StateError: {words}.*See: dpsweep.open\('tiny'\).trials$", done.stderr)


def test_the_quickstart_finds_a_good_config_and_exports_it(tmp_path, dpsweep):
    shown = dpsweep("launch", ROOT / "sweeps/quickstart.yaml", "--set", "budget.trials=8")
    assert "[14/14]" in shown
    assert "Browse the trials in MLflow:" in shown
    best = json.loads(dpsweep("best", "quickstart", "--top", "1", "--json"))[0]
    # 360 test images: a binomial standard deviation of 0.015 around the 0.93 to 0.95 that is usual
    assert best["valid/accuracy"] > 0.87
    assert 3.99 < best["privacy/epsilon_spent"] <= 4
    exported = load_trial(read_yaml(tmp_path / "best.yaml"))
    assert exported.method.kappa == best["knobs"]["method.kappa"]
    runs, _ = runs_of(f"sqlite:///{tmp_path}/.dpsweep/mlflow.db", "quickstart")
    assert len(runs) == 15, "8 trials, 6 repeats and the sweep"
    notes = [run.data.tags["mlflow.note.content"] for run in runs.values()]
    assert all("differentially private" in note for note in notes)
    parent = runs["quickstart"].info.run_id
    children = [run for name, run in runs.items() if name != "quickstart"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent}
    again = dpsweep("launch", ROOT / "sweeps/quickstart.yaml", code=2)
    assert "a sweep called 'quickstart' is already in" in again


@pytest.fixture
def ray_head(tmp_path_factory):
    """A Ray cluster that is there already; its address."""
    port, folder = a_port(), tmp_path_factory.mktemp("r")
    head = subprocess.Popen(
        python(
            "ray.scripts.scripts",
            *("start", "--head", "--block", "--port", port, "--num-cpus", 2),
            *("--temp-dir", folder, "--include-dashboard=false", "--disable-usage-stats"),
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: answers(port), "Ray's answer")
    yield f"127.0.0.1:{port}"
    head.terminate()
    head.wait(30)


@pytest.fixture
def tracking_server(start_mlflow, free_port):
    """A real MLflow server; its URI."""
    start_mlflow(free_port)
    return f"http://127.0.0.1:{free_port}"


def test_the_same_sweep_runs_on_a_cluster_and_a_server_that_are_there_already(
    tmp_path, sweep_file, dpsweep, ray_head, tracking_server
):
    services = ["--address", ray_head, "--tracking-uri", tracking_server]
    dpsweep("launch", sweep_file, *services)
    dpsweep("launch", sweep_file, *services, "--state", "other")  # a namesake of somebody else's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(tracking_server)
        experiment = client.get_experiment_by_name("tiny").experiment_id
        runs = client.search_runs([experiment])
    assert len(runs) == 6, "two sweeps of one name have six runs of their own"
    assert {run.info.status for run in runs} == {"FINISHED"}
    parents = [run for run in runs if run.info.run_name == "tiny"]
    stored = {a.path for a in client.list_artifacts(parents[0].info.run_id)}
    assert stored == {"best.yaml", "privacy.md", "report.html", "sweep.yaml"}
    assert not (tmp_path / ".dpsweep/mlflow.db").exists()


@pytest.mark.slow
def test_fashion_mnist_from_a_torchvision_folder(tmp_path, dpsweep):
    root = os.environ.get("DPSWEEP_TEST_DATA")
    if not root:
        pytest.skip("set DPSWEEP_TEST_DATA to a folder with FashionMNIST/raw in it")
    small = ["--set", f"data.root={root}", "--set", "budget.trials=2", "--set", "train.epochs=1"]
    dpsweep("launch", ROOT / "sweeps/fashion_mnist_fftkf.yaml", *small, timeout=600)
    best = json.loads(dpsweep("best", "fashion-mnist-fftkf", "--json"))
    # One epoch at epsilon 4; always guessing one class would reach 0.1.
    assert best[0]["valid/accuracy"] > 0.4


def python(module, *args):
    return [sys.executable, "-m", module, *map(str, args)]


def a_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def answers(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0
