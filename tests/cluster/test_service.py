"""A service on this machine as a user has it: up, submit, look, stop, resume, down. All real."""

import base64
import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from waiting import CEILING_SECONDS, wait_for

from dpsweep.cluster.jobs import jobs_at
from dpsweep.cluster.local import Local
from dpsweep.cluster.processes import http_status
from dpsweep.cluster.services import BUCKET, check_installed
from dpsweep.core.errors import DpSweepError

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NETS = """\
from torch import nn

def make(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], num_classes))
"""
LONG = ("--set", "train.epochs=400", "--set", "train.evaluate_every=1")


def up(laptop, local, *options):
    """Starts it at `local`'s folder by the command line, and returns what a shell would source."""
    laptop("up", "--local", "--state", local.folder.parent, "--cpus", 2, *options)
    text = (local.folder / "env").read_text()
    return dict(re.findall(r"^export (\w+)='?([^'\n]*)'?$", text, re.M))


def test_a_sweep_is_submitted_followed_stopped_resumed_and_fetched_from_a_laptop(
    tmp_path, sweep_file, laptop, local, clean, command_lines
):
    env = up(laptop, local, "--nodes", 2)
    token = (local.folder / "ray_token").read_text()
    assert (local.folder / "env").stat().st_mode & 0o777 == 0o600
    assert Local.at(local.folder).num_alive() == 2
    assert "a local cluster is up already" in laptop(
        "up", "--local", "--state", local.folder.parent, code=2
    )

    (tmp_path / "nets.py").write_text(NETS)
    own = ("--set", "model={name: own, function: 'nets:make', folder: .}")
    shown = laptop("submit", sweep_file, *own, **env)
    assert "[2/2] trial" in shown
    assert "2 trials in" in shown
    assert "Fetch its best config with: dpsweep export tiny -o best/" in shown
    assert json.loads(laptop("status", "tiny", "--json", **env))[0]["state"] == "complete"
    laptop("export", "tiny", "-o", "best", **env)
    assert (tmp_path / "best/01-trial-0000.yaml").exists() != (
        tmp_path / "best/01-trial-0001.yaml"
    ).exists()
    assert (tmp_path / ".dpsweep/submitted/tiny.json").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / ".dpsweep/sweeps").exists()
    diverge = ("--set", "search={optimizer.lr: {choice: [2.0e+38, 3.0e+38]}}")
    shown = laptop("submit", sweep_file, "--name", "none", *diverge, code=1, **env)
    assert "sweep 'none' is finished, and no trial was completed: 2 failed" in shown
    taken = laptop("submit", sweep_file, code=2, **env)
    assert "a sweep called 'tiny' is already in" in taken
    assert "dpsweep resume tiny" in taken

    follower = subprocess.Popen(
        [sys.executable, "-m", "dpsweep", "submit", sweep_file, "--name", "long", *LONG],
        cwd=tmp_path, env={**clean, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    trial_dirs = local.state / "sweeps/long/trials"
    wait_for(lambda: any(trial_dirs.glob("*/metrics.json")), "a first report", follower)
    follower.send_signal(signal.SIGINT)
    said, _ = follower.communicate(timeout=CEILING_SECONDS)
    assert follower.returncode == 130
    assert "not followed any more; the sweep goes on" in said
    again = laptop("submit", sweep_file, "--name", "long", *LONG, code=2, **env)
    assert "sweep 'long' is being run at http://127.0.0.1:" in again
    assert "long is stopped" in laptop("stop", "long", **env)
    assert "is not running" in laptop("stop", "long", code=2, **env)
    resumed = laptop("resume", "long", "-o", "long.yaml", **env)
    assert "of sweep long," in (tmp_path / "long.yaml").read_text()
    assert "0 trials finished, 2 to continue, 0 trials to run" in resumed
    assert "2 trials in" in resumed
    said = laptop("logs", "long", **env)
    assert "2 to continue" in said
    assert "dpsweep speaks" not in said
    assert "Type it on a node of that cluster" in laptop("report", "long", code=2, **env)
    assert "long was submitted to" in laptop("status", **env)

    ray_client = Local.at(local.folder).client_address
    shown = laptop("launch", sweep_file, "--name", "there", "--address", ray_client, "-q", **env)
    assert "trial" not in shown
    assert (tmp_path / "best.yaml").read_text().startswith("# dpsweep export")

    missing = {k: v for k, v in env.items() if not k.startswith("RAY_")}
    told = laptop("status", "tiny", code=2, **missing, HOME=str(tmp_path))
    assert "the cluster asks for a token, and RAY_AUTH_MODE is not set here" in told
    (tmp_path / "wrong").write_text("f" * 64)
    wrong = {**env, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "wrong")}
    told = laptop("submit", sweep_file, "--name", "x", code=2, **wrong)
    assert "the one here is missing or wrong" in told
    assert not [words for words in command_lines() if token in words]
    assert token not in "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    )

    nodes = Local.at(local.folder).nodes
    assert "2 processes ended" in laptop("down", "--state", local.folder.parent)
    assert not [node for node in nodes if node.is_alive]
    assert not [words for words in command_lines() if Local.at(local.folder).runtime in words]
    assert "0 processes ended" in laptop("down", "--state", local.folder.parent)
    assert "nothing answers there" in laptop("status", "tiny", code=2, **env)
    laptop("down", "--remove", "--state", local.folder.parent)
    assert not local.folder.exists()


def test_runs_are_in_mlflow_on_postgresql_and_artifacts_in_the_bucket(
    tmp_path, sweep_file, laptop, local, command_lines
):
    try:
        check_installed()
    except DpSweepError as e:
        pytest.skip(str(e))
    env = up(laptop, local, "--nodes", 1, "--tracking")
    words = json.loads((local.folder / "secrets.json").read_text())
    shown = laptop("submit", sweep_file, **env)
    assert f"MLflow: {env['MLFLOW_TRACKING_URI']}" in shown
    ports = Local.at(local.folder).ports

    assert (
        http_status(f"{env['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/experiments/get?experiment_id=0")
        == 401
    )
    runs = mlflow(env, "runs/search", {"experiment_ids": experiments(env), "max_results": 100})
    assert len([r for r in runs["runs"] if r["info"]["status"] == "FINISHED"]) == 3
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['s3']}/{BUCKET}?list-type=2") as answer:
        listing = answer.read().decode()
    assert re.search(r"<Key>[^<]*sweep\.yaml</Key>", listing), listing
    assert not (local.state / "study.db").exists()
    assert not (local.state / "mlflow.db").exists()

    everything = shown + "".join(
        path.read_text(errors="replace")
        for place in (local.folder / "logs", local.state, tmp_path)
        for path in place.rglob("*")
        if path.is_file() and path.name not in ("env", "secrets.json", "pgpass", "up.json")
    )
    for secret in words.values():
        assert secret not in everything
        assert not [command for command in command_lines() if secret in command]

    laptop("down", "--state", local.folder.parent)
    env = up(laptop, local, "--nodes", 1, "--tracking")
    assert json.loads(laptop("status", "tiny", "--json", **env))[0]["state"] == "complete"


def test_nodes_are_killed_added_and_the_head_comes_back_on_its_ports(local, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    local.prepare(1)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(local.folder / "ray_token"))
    local.start_nodes(2)
    local.kill_node(1)
    wait_for(lambda: local.num_alive() == 1, "the loss of a node")
    local.add_node()
    assert local.num_alive() == 2
    before = local.jobs_address
    local.restart_head()
    assert local.jobs_address == before
    assert local.num_alive() == 2
    assert jobs_at(before).find("dpsweep-") == []


def test_what_fails_half_way_leaves_nothing_running(laptop, local, command_lines):
    local.folder.mkdir(parents=True)
    fake = local.folder.parent / "bin"
    fake.mkdir()
    (fake / "sitecustomize.py").write_text(
        "import sys\nif '--address' in sys.argv: sys.exit('no worker today')\n"
    )
    options = ("--local", "--nodes", 2, "--state", local.folder.parent)
    told = laptop("up", *options, code=2, PYTHONPATH=str(fake))
    assert "Ray node 1 ended at once" in told
    assert "no worker today" in told
    assert not Local.at(local.folder).is_up
    assert not [words for words in command_lines() if Local.at(local.folder).runtime in words]
    assert "0 processes ended" in laptop("down", "--state", local.folder.parent)


def experiments(env):
    found = mlflow(env, "experiments/search", {"max_results": 100})["experiments"]
    return [experiment["experiment_id"] for experiment in found]


def mlflow(env, verb, body):
    key = base64.b64encode(f"admin:{env['MLFLOW_TRACKING_PASSWORD']}".encode()).decode()
    request = urllib.request.Request(
        f"{env['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/{verb}",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Basic {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
