"""What a sweep will take is estimated before it begins, and a disk that is too small refused."""

import re

import pytest
import torch

from dpsweep.config.plan import plan_privacy
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import DiskFull, StateError
from dpsweep.core.seeds import Secret
from dpsweep.execution import disk_use
from dpsweep.execution import preflight as check
from dpsweep.execution.disk_use import (
    check_disk_space,
    checkpoint_bytes,
    estimate_disk_bytes,
    history_bytes,
    weight_bytes,
)
from dpsweep.execution.preflight import describe_correlation
from dpsweep.store import filesystem as mounts
from dpsweep.store.state_dir import StateFolder
from dpsweep.training.assemble import assemble_step, initial_params


def test_weights_and_checkpoint_are_estimated_from_the_config_alone(sweep_file):
    config = load_sweep(sweep_file).reference_trial
    step = assemble_step(config, Secret.draw(), torch.device("cpu"))
    progress = step.start(initial_params(step))
    for _ in range(3):
        step(progress)
    assert weight_bytes(config) == sum(x.nbytes for x in progress.params.values())
    stored = torch.utils._pytree.tree_leaves(progress.state_dict())
    held = sum(x.nbytes for x in stored if isinstance(x, torch.Tensor))
    assert held <= checkpoint_bytes(config) <= 4 * held


def test_trials_and_those_at_once_count(sweep_file):
    sweep, more = load_sweep(sweep_file), load_sweep(sweep_file, ["budget.trials=12"])
    config = sweep.reference_trial
    each = weight_bytes(config) + disk_use._ENTRY_BYTES
    assert estimate_disk_bytes(more, 1) - estimate_disk_bytes(sweep, 1) == 10 * each
    assert estimate_disk_bytes(sweep, 2) - estimate_disk_bytes(sweep, 1) == 2 * checkpoint_bytes(
        config
    )
    assert estimate_disk_bytes(sweep, 99) == estimate_disk_bytes(sweep, 2), (
        "no more run than there are"
    )


def test_too_little_room_is_refused_with_both_numbers(sweep_file, tmp_path, monkeypatch):
    sweep = load_sweep(sweep_file)
    needed = estimate_disk_bytes(sweep, 1)
    monkeypatch.setattr(disk_use, "free_bytes", lambda _: needed)
    check_disk_space(sweep, tmp_path, 1)
    monkeypatch.setattr(disk_use, "free_bytes", lambda _: needed - 1)
    with pytest.raises(
        DiskFull, match=r"takes up to 2\.\d MB there \(2 trials\), and 2\.\d MB are"
    ):
        check_disk_space(sweep, tmp_path, 1)
    with pytest.raises(DiskFull):
        check.check_services(sweep, StateFolder(tmp_path / "state"), None)


@pytest.mark.parametrize(
    ("tracking", "storage", "what"),
    [
        (None, None, "study.db: the study would be a SQLite file on nfs4"),
        (None, "postgresql+psycopg://h/db", "mlflow.db: tracking would be .* --tracking-uri http"),
        ("http://h:5000", None, "study.db: the study would be .* --storage postgresql://"),
        ("http://h:5000", "sqlite:////{}/x.db", "x.db: the study would be"),
    ],
)
def test_a_database_file_is_refused_where_machines_share_it(
    tmp_path, monkeypatch, tracking, storage, what
):
    listing, place = tmp_path / "mounts", tmp_path.resolve()
    listing.write_text(f"server:/x {place} nfs4 rw 0 0\n")
    monkeypatch.setattr(mounts, "MOUNTS", listing)
    storage = storage and storage.replace("/{}", str(place))
    state = StateFolder(tmp_path / "state")
    with pytest.raises(StateError, match=what):
        check.check_files(state, tracking, storage)
    check.check_files(state, "http://h:5000", "postgresql+psycopg://h/db")


def test_noise_history_is_counted_in_the_resume_state_and_described_in_a_plan(sweep_file):
    search = "search={optimizer.lr: {choice: [1, 2]}}"
    sgd = [search, "base.train.batch_size=64", "base.method={name: dp_sgd}"]
    plain = load_sweep(sweep_file, sgd).reference_trial
    sweep = load_sweep(
        sweep_file, [search, "base.train.batch_size=64", "base.method={name: bandmf, bands: 4}"]
    )
    config = sweep.reference_trial
    num_weights = weight_bytes(config) // 4
    assert history_bytes(plain) == 0
    assert history_bytes(config) == 3 * 8 * num_weights
    assert checkpoint_bytes(config) == checkpoint_bytes(plain) + history_bytes(config)
    words = describe_correlation(config, plan_privacy(config))
    assert re.match(r"bandmf, batch size 64: 4 bands, \d+ rounds at rate 0\.178; predicted", words)
    ratio = float(re.search(r", ([\d.]+) times independent noise's", words)[1])
    assert 0.5 < ratio < 1
