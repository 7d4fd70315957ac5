"""Trials that go wrong in every way at once: each ends with its reason, and the others go on."""

from pathlib import Path

import pytest

from dpsweep.store.state_dir import State
from dpsweep.store.study import open_study

SWEEP = """\
name: faults
base:
  data: {{name: digits}}
  model: {{name: own, function: "faulty_net:make", folder: {here}, arguments: {{fault: none}}}}
  privacy: {{epsilon: 4}}
  train: {{batch_size: 128, epochs: 4, max_physical_batch: 64}}
  optimizer: {{lr: 1.0}}
  method: {{name: dp_sgd}}
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


@pytest.mark.slow
def test_each_trial_that_goes_wrong_ends_with_its_reason_and_the_others_go_on(tmp_path, dpsweep):
    file = tmp_path / "faults.yaml"
    file.write_text(SWEEP.format(here=Path(__file__).parent))
    said = dpsweep("launch", file, timeout=1200)
    assert said.count("it is run once more, alone and with half the examples at once") == 2
    state = State.at(str(tmp_path / ".dpsweep"))
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
