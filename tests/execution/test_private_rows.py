"""The message of a private row stays where the file is: not in the study nor a node's report."""

import json

import pytest

from dpsweep.cluster.nodes import facts
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import PrivateRowError
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
    assert found["faults"] == [
        "a row of the data is not as declared there. See it with dpsweep check there"
    ]
