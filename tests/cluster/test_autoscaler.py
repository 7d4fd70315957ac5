"""Clusters that grow: from no node that fits a trial, and beyond the nodes of the start."""

import re
from pathlib import Path

import pytest
from autoscaling import growing_cluster

from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import open_study

pytestmark = [pytest.mark.slow, pytest.mark.ray]

SETTINGS = ("budget.trials=6", "train.epochs=60", "resources.cpu=2", "train.threads=1")
"""Trials that last, on an idle machine too, until the second node has joined. More threads than
cores, four with two such nodes on one machine of two, would wait for one another."""


def test_a_sweep_waits_for_its_first_node_and_uses_each_that_joins(
    sweep_file, tmp_path, dpsweep, monkeypatch
):
    """The head's one CPU fits no trial: to launch was a mistake, and its end."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with growing_cluster(CPU=2) as address:
        options = [word for setting in SETTINGS for word in ("--set", setting)]
        said = dpsweep(
            "launch",
            sweep_file,
            "--address",
            address,
            *options,
            timeout=1200,
            RAY_AUTH_MODE="disabled",
        )
    assert "no node of the cluster has 2 CPU: waiting for its autoscaler to add one" in said
    assert re.search(r"\(node \w{8}\) joined and gets trials", said)
    state = StateFolder.at(str(tmp_path / ".dpsweep"))
    assert [r.state for r in open_study("tiny", state).records()] == ["complete"] * 6
    began = {Path(p).read_text() for p in state.sweep("tiny").path.glob("trials/*/begun")}
    assert len(began) == 2, "trials ran on both nodes"
