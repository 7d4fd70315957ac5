"""Data are the same in every process of a sweep, or no trial begins."""

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import StateError
from dpsweep.data.read import fingerprint_images, load_dataset
from dpsweep.execution.launch import create_session
from dpsweep.execution.worker import check_same_data
from dpsweep.store.state_dir import StateFolder
from dpsweep.training.trial_dir import TrialDir

CODE = """
import os
import torch


def make(split, order="sorted"):
    num = 40 if split == "train" else 10
    rng = torch.Generator().manual_seed(os.getpid() if order == "process" else 0)
    x = torch.randn(num, 3, generator=torch.Generator().manual_seed(0))
    places = torch.randperm(num, generator=rng)
    return [(x[i], int(x[i].sum() > 0)) for i in places]
"""

SWEEP = """
name: own
base:
  data:
    name: own
    function: "order_{order}:make"
    folder: {folder}
    arguments: {{order: {order}}}
    shape: [3]
    num_classes: 2
    num_train: 40
    num_test: 10
    task: {{name: classification}}
  model: {{name: linear}}
  privacy: {{noise_multiplier: 1.0}}
  train: {{batch_size: 10, epochs: 1, device: cpu}}
  optimizer: {{lr: 0.1}}
  method: {{name: dp_sgd}}
search: {{optimizer.lr: {{log_uniform: [0.01, 1]}}}}
budget: {{trials: 2}}
"""


@pytest.fixture
def write(tmp_path):
    def make(order):
        (tmp_path / f"order_{order}.py").write_text(CODE)
        place = tmp_path / "own.yaml"
        place.write_text(SWEEP.format(folder=tmp_path, order=order))
        return place

    return make


@pytest.mark.parametrize("order", ["sorted", "process"])
def test_a_process_that_reads_another_order_trains_no_trial(order, write, tmp_path, monkeypatch):
    sweep, folder = load_sweep(write(order)), StateFolder(tmp_path / "state").sweep("own")
    folder.create(sweep.file, sweep.base, None)
    config = sweep.reference_trial
    folder.check_data(fingerprint_images(config.data, config.seed, folder.data_key()))
    load_dataset.cache_clear()
    monkeypatch.setattr("os.getpid", lambda: 1)  # as in a worker
    if order == "sorted":
        check_same_data(config, TrialDir(folder.trial_dir(0)))
        return
    with pytest.raises(StateError, match=r"another order.*Sort what you list"):
        check_same_data(config, TrialDir(folder.trial_dir(0)))


TABLE = """
name: own
base:
  data:
    name: table
    file: {folder}/rows.csv
    columns: {{x: {{range: [0, 100]}}}}
    target: y
    num_classes: 2
    num_train: 40
    task: {{name: classification}}
    validation: holdout
  model: {{name: linear}}
  privacy: {{noise_multiplier: 1.0}}
  train: {{batch_size: 9, epochs: 1, device: cpu}}
  method: {{name: bandmf, bands: 2}}
search: {{optimizer.lr: {{log_uniform: [0.01, 1]}}}}
budget: {{trials: 2}}
"""


def test_a_file_that_is_sorted_anew_while_the_sweep_runs_trains_no_trial(tmp_path, monkeypatch):
    """Other rows were held out in the trials to come, and a trial that went on had other groups."""
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    rows = [f"{i},{i % 2}\n" for i in range(40)]
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(rows))
    (tmp_path / "own.yaml").write_text(TABLE.format(folder=tmp_path))
    sweep = load_sweep(tmp_path / "own.yaml")
    folder = StateFolder(tmp_path / "state").sweep("own")
    folder.create(sweep.file, sweep.base, None)
    config, trial_dir = sweep.reference_trial, TrialDir(folder.trial_dir(0))
    folder.check_data(fingerprint_images(config.data, config.seed, folder.data_key()))
    check_same_data(config, trial_dir)
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(rows[::-1]))
    load_dataset.cache_clear()  # as in a new worker
    with pytest.raises(StateError, match="data: the files hold other examples, or another order"):
        check_same_data(config, trial_dir)


def test_a_warm_start_where_other_examples_were_held_out_is_refused(tmp_path, monkeypatch):
    """What the earlier sweep measured without noise would be trained on."""
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dpsweep.execution.launch._list_nodes", lambda: [{"CPU": 2.0}])
    rows = [f"{i},{i % 2}\n" for i in range(40)]
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(rows))
    (tmp_path / "own.yaml").write_text(TABLE.format(folder=tmp_path))
    state = StateFolder(tmp_path / "state")
    with create_session(load_sweep(tmp_path / "own.yaml"), state, None):
        pass
    again = ["learn_from=own", "sampler.name=tpe"]
    with create_session(load_sweep(tmp_path / "own.yaml", ["name=same", *again]), state, None):
        pass
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(rows[::-1]))
    load_dataset.cache_clear()
    other = load_sweep(tmp_path / "own.yaml", ["name=other", *again])
    message = "learn_from: the data are not those of sweep 'own', so other examples were held out"
    with pytest.raises(StateError, match=message), create_session(other, state, None):
        pass
    assert not state.sweep("other").path.exists()
