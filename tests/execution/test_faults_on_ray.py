"""Trials that go wrong in every way at once: each ends with its reason, and the others go on."""

from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import open_study

BASE = """\
base:
  data: {{name: digits}}
  model: {{name: own, function: "faulty_net:make", folder: {here}, arguments: {{fault: none}}}}
  privacy: {{epsilon: 4}}
  train: {{batch_size: 128, epochs: 4, max_physical_batch: 64}}
  optimizer: {{lr: 1.0}}
  method: {{name: dp_sgd}}
"""

SWEEP = (
    f"name: faults\n{BASE}"
    + """\
search:
  optimizer.lr: {{choice: [1.0, 3.0e+38]}}
  model.arguments.fault: {{choice: [none, segfault, hang, leak, memory, always_memory]}}
start:
  - {{model.arguments.fault: hang, optimizer.lr: 1.0}}
  - {{model.arguments.fault: memory, optimizer.lr: 1.0}}
  - {{model.arguments.fault: leak, optimizer.lr: 1.0}}
  - {{model.arguments.fault: segfault, optimizer.lr: 1.0}}
  - {{model.arguments.fault: none, optimizer.lr: 3.0e+38}}
  - {{model.arguments.fault: none, optimizer.lr: 1.0}}
sampler: {{name: random}}
budget: {{trials: 6, trial_timeout: 45s}}
resources: {{memory: 2GB, max_concurrent: 2}}
"""
)


@pytest.mark.slow
def test_each_trial_that_goes_wrong_ends_with_its_reason_and_the_others_go_on(tmp_path, dpsweep):
    file = tmp_path / "faults.yaml"
    file.write_text(SWEEP.format(here=Path(__file__).parent))
    said = dpsweep("launch", file, timeout=1200)
    assert said.count("it is run once more, alone and with half the examples at once") == 2
    state = StateFolder.at(str(tmp_path / ".dpsweep"))
    study = open_study("faults", state)
    hang, memory, leak, segfault, diverges, well = study.records()
    ends = [r.state for r in (hang, memory, leak, segfault, diverges, well)]
    assert ends == ["failed", "complete", "failed", "failed", "failed", "complete"]
    assert "it reported nothing for budget.trial_timeout" in hang.reason
    assert "faulty_net.py" in hang.reason
    assert "(hang)" in hang.reason
    assert memory.reason is None
    assert "held more than resources.memory, 2.0 GB, and, alone" in leak.reason
    assert "died again and again; the last time: Segmentation fault in" in segfault.reason
    assert "stopped being finite" in diverges.reason
    assert all(r.charged for r in study.records()), "what failed has spent its whole length too"
    folder = state.sweep("faults")
    assert not list(folder.path.rglob("secret"))
    assert not list(folder.path.rglob("checkpoint.pt"))
    assert not (folder.path / "ray").exists()


LOST = """\
name: lost
base:
  data: {{name: digits}}
  model:
    name: own
    function: "faulty_net:make"
    folder: {here}
    arguments: {{fault: none, notes: {notes}}}
  privacy: {{epsilon: 4}}
  train: {{batch_size: 128, epochs: 2, max_physical_batch: 64}}
  optimizer: {{lr: 1.0}}
  method: {{name: dp_sgd}}
search:
  # the first option is that of the trial that is checked beforehand
  model.arguments.fault: {{choice: [none, lost_once, lost]}}
start:
  - {{model.arguments.fault: lost_once}}
  - {{model.arguments.fault: lost}}
  - {{model.arguments.fault: none}}
sampler: {{name: random}}
budget: {{trials: 3}}
resources: {{max_concurrent: 1}}
"""


@pytest.mark.slow
def test_a_process_that_lost_its_gpu_ends_and_costs_no_trial_after_it(tmp_path, dpsweep):
    """One actor at a time, used again and again: each process raises its first error for ever."""
    notes, file = tmp_path / "notes", tmp_path / "lost.yaml"
    notes.mkdir()
    file.write_text(LOST.format(here=Path(__file__).parent, notes=notes))
    dpsweep("launch", file)
    once, always, well = open_study("lost", StateFolder.at(str(tmp_path / ".dpsweep"))).records()
    processes = {name: set() for name in ("lost_once", "lost", "none")}
    for note in notes.iterdir():
        fault, _, process = note.name.partition("-")
        processes[fault].add(process)
    assert once.state == "complete", "in its second process"
    assert len(processes["lost_once"]) == 2
    assert always.state == "failed"
    assert "died again and again; the last time: CUDA error: an illegal memory" in always.reason
    assert "in faulty_net.py:" in always.reason
    assert well.state == "complete"
    assert len(processes["none"]) == 2, "the check beforehand, and the trial"
    assert not processes["none"] & processes["lost"]
    assert all(record.charged for record in (once, always, well))
    private = (tmp_path / ".dpsweep/sweeps/lost/trials/0001/error.txt").read_text()
    assert "AcceleratorError: CUDA error: an illegal memory access" in private


BAD_NODE = (
    f"name: bad\n{BASE}"
    + """\
search:
  optimizer.lr: {{choice: [0.5, 1.0]}}
sampler: {{name: random}}
budget: {{trials: 8}}
"""
)


@pytest.mark.slow
def test_a_node_on_which_trials_fail_at_once_is_avoided_and_costs_no_trial(
    tmp_path, dpsweep, monkeypatch
):
    """It failed 11 of 12 trials within 6 s: each was charged, and none could be run again."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
    file = tmp_path / "bad.yaml"
    file.write_text(BAD_NODE.format(here=Path(__file__).parent))
    head = {"num_cpus": 1, "gcs_server_port": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = cluster.add_node(num_cpus=1, env_vars={"DPSWEEP_TEST_BAD_NODE": "1"})
        said = dpsweep("launch", file, "--address", cluster.address, RAY_AUTH_MODE="disabled")
        state = StateFolder.at(str(tmp_path / ".dpsweep"))
        assert f"(node {node.node_id[:8]}) is avoided: 2 trials failed there so" in said
        assert said.count("failed before its first step on") == 2
        assert [r.state for r in open_study("bad", state).records()] == ["complete"] * 8
        began = [p.read_text() for p in state.sweep("bad").path.glob("trials/*/begun")]
        assert sum(text.count(node.node_id) for text in began) == 2
    finally:
        cluster.shutdown()
