"""The message of a private row stays where the file is: not in the study nor a node's report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpsweep.cluster.nodes import facts
from dpsweep.config.trial import TrialConfig, dump_trial
from dpsweep.core.errors import PrivateRowError
from dpsweep.data import validate_data
from dpsweep.data.read import load_dataset
from dpsweep.execution import worker
from dpsweep.training.trial_dir import TrialDir


@pytest.fixture
def config(tmp_path):
    """A trial on a table with one row that is not as declared."""
    file = tmp_path / "t.csv"
    file.write_text("age,ill\n" + "40,0\n" * 30 + "977,1\n")
    return TrialConfig.model_validate(
        {
            "data": {
                "name": "table",
                "file": str(file),
                "target": "ill",
                "columns": {"age": {"range": [0, 120]}},
                "task": {"name": "classification", "classes": ["0", "1"]},
                "num_train": 31,
                "validation": "holdout",
            },
            "model": {"name": "linear"},
            "privacy": {"noise_multiplier": 1},
            "train": {"batch_size": 8, "epochs": 1},
            "method": {"name": "dp_sgd"},
        }
    )


def test_a_failed_trial_sends_no_value_of_a_row(config, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(worker.tune, "report", sent.append)
    place = TrialDir(tmp_path / "trial")
    place.make_secret()
    try:
        load_dataset(config.data, 0)
    except PrivateRowError as e:
        worker._send_failure(place.path, e)
    (message,) = (json.loads(each[worker.PAYLOAD]) for each in sent)
    assert message["end"] == "failed"
    assert "977" not in message["reason"]
    assert message["reason"].startswith("PrivateRowError at rows.py:")
    assert "977" in (place.path / "error.txt").read_text(), "its owner reads it there"


def test_a_node_reports_no_value_of_a_row(config):
    found = facts(config.model_dump(mode="json"), (b"0" * 32, ""), None)
    assert found["data_ok"] is False
    assert found["faults"] == [PrivateRowError.public]


def test_the_log_of_a_submitted_job_has_no_value_of_a_row(config, tmp_path, verb):
    """Everybody who sees the cluster's dashboard can read it."""
    place = tmp_path / "trial.yaml"
    place.write_text(dump_trial(config))
    cache = {"DPSWEEP_CACHE": str(tmp_path / "cache")}
    assert "977" in verb("train", place, code=2, **cache), "who types it sees the row"
    done = subprocess.run(
        [sys.executable, "-m", "dpsweep", "train", str(place)],
        cwd=tmp_path,
        env={**os.environ, **cache, "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"},  # Ray sets it for a job
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    log = done.stdout + done.stderr
    assert "977" not in log
    assert PrivateRowError.public in log.replace("\n", " ")


@pytest.mark.parametrize("kind", ["label", "file name", "line"])
def test_labels_names_of_images_and_broken_lines_are_private_rows(kind, config, tmp_path):
    """Until 2026-11-22 they were sent to the study, to MLflow and in a node's report."""
    if kind == "line":
        Path(config.data.file).write_text("age,ill\n" + "40,0\n" * 30 + "977,1,5\n")
        data = config.data
    else:
        images = tmp_path / "images"
        if kind == "label":
            arrays = {"x_train": np.zeros((4, 8, 8), np.uint8), "y_train": np.array([0, 1, 977, 0])}
            np.savez(images.with_suffix(".npz"), **arrays)
        else:
            for label in "ab":
                (images / label).mkdir(parents=True)
                Image.new("L", (8, 8)).save(images / label / "1.png")
            (images / "a" / "patient-977.png").write_bytes(b"no image")
        tree = {
            "name": "npz" if kind == "label" else "folder",
            "root": str(images.with_suffix(".npz") if kind == "label" else images),
            "shape": [1, 8, 8],
            "num_classes": 2,
            "num_train": 4 if kind == "label" else 3,
            "validation": "holdout",
        }
        data = validate_data(tree)
    with pytest.raises(PrivateRowError):
        load_dataset(data, 0)
