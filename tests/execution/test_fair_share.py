"""Two sweeps on one cluster: each takes its share, and none waits for the other's end."""

import os
import subprocess
import sys

import pytest
from ray.cluster_utils import Cluster
from waiting import CEILING_SECONDS

from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import open_study


@pytest.mark.slow
def test_a_sweep_leaves_the_rest_of_the_cluster_to_others(tmp_path, sweep_file, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "gcs_server_port": 0, "include_dashboard": False},
    )
    sweeps = []
    try:
        settings = ["budget.trials=3", "train.epochs=20", "resources.max_concurrent=1"]
        sweeps = [
            subprocess.Popen(
                [sys.executable, "-m", "dpsweep", "launch", str(sweep_file), "--quiet"]
                + ["--address", cluster.address, "--set", f"name={name}"]
                + [word for setting in settings for word in ("--set", setting)],
                cwd=tmp_path,
                env={**os.environ, "DPSWEEP_STATE": str(tmp_path / name)},
            )
            for name in ("one", "other")
        ]
        assert [sweep.wait(CEILING_SECONDS) for sweep in sweeps] == [0, 0]
    finally:
        for sweep in sweeps:
            sweep.kill()
            sweep.wait()
        cluster.shutdown()
    spans = {}
    for name in ("one", "other"):
        study = open_study(name, StateFolder.at(str(tmp_path / name)))
        assert [r.state for r in study.records()] == ["complete"] * 3
        trials = study._study.get_trials(deepcopy=False)
        spans[name] = [(t.datetime_start, t.datetime_complete) for t in trials]
        assert not any(overlap(a, b) for i, a in enumerate(spans[name]) for b in spans[name][:i])
    assert any(overlap(a, b) for a in spans["one"] for b in spans["other"]), "side by side"


def overlap(one, other):
    return one[0] < other[1] and other[0] < one[1]
