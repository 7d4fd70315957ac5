"""Ray's own drain of a node, as a cloud's notice sets it off: its trial goes on elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from servers import python
from waiting import CEILING_SECONDS, wait_for

from dpsweep.execution.failures import read_begins
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import open_study
from dpsweep.training.trial_dir import TrialDir

pytestmark = [pytest.mark.slow, pytest.mark.ray]

SWEEP = """\
name: drained
base:
  data: {name: digits}
  model: {name: linear}
  privacy: {epsilon: 4}
  train: {batch_size: 64, epochs: 150, evaluate_every: 3}
  optimizer: {lr: 1.0}
  method: {name: dp_sgd}
search:
  optimizer.lr: {choice: [0.5, 1.0]}
sampler: {name: random}
budget: {trials: 1}
"""
DEADLINE_SECONDS = 300


def test_a_trial_on_a_spot_node_saves_its_state_and_goes_on_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
    file = tmp_path / "drained.yaml"
    file.write_text(SWEEP)
    state = StateFolder(tmp_path / ".dpsweep")
    trial = state.sweep("drained").trial_dir(0)
    head = {"num_cpus": 0, "gcs_server_port": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1) for _ in range(2))}
        with (tmp_path / "said").open("w") as said:
            launch = subprocess.Popen(
                python("dpsweep", "launch", file, "--address", cluster.address),
                cwd=tmp_path, stdout=said, stderr=said,
            )  # fmt: skip
        wait_for((trial / "metrics.json").exists, "a first report", launch)
        (spot,) = read_begins(trial)
        secret = (trial / "secret").read_bytes()
        subprocess.run(
            [Path(sys.executable).with_name("ray"), "drain-node", "--address", cluster.address,
             "--node-id", spot, "--reason", "DRAIN_NODE_REASON_PREEMPTION",
             "--reason-message", "spot", "--deadline-remaining-seconds", str(DEADLINE_SECONDS)],
            check=True, capture_output=True, timeout=CEILING_SECONDS,
        )  # fmt: skip
        wait_for(
            lambda: len(read_begins(trial)) == 2, "a begin elsewhere", launch, DEADLINE_SECONDS
        )
        cluster.remove_node(
            nodes[spot], allow_graceful=False
        )  # what is left of it, as a cloud does
        assert (trial / "secret").read_bytes() == secret, "it would have released twice"
        assert launch.wait(2 * CEILING_SECONDS) == 0, (tmp_path / "said").read_text()
    finally:
        cluster.shutdown()
    other = read_begins(trial)[1]
    assert {spot, other} == set(nodes)
    (record,) = open_study("drained", state).records()
    assert record.state == "complete"
    rows = TrialDir(trial).rows()
    assert [round(row["epoch"]) for row in rows] == [*range(3, 151, 3)], (
        "no report is lost or doubled"
    )
