"""The best model in MLflow's registry: found by its alias, with its promise, and only once."""

import json
from importlib import import_module
from zipfile import ZipFile, is_zipfile

import numpy as np
import pytest
import torch

from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.data.read import load_dataset
from dpsweep.execution.tracking import TrackingWatcher
from dpsweep.results.register import (
    ServedModel,
    _describe_inputs,
    _make_example,
    _tags,
    register_best,
)
from dpsweep.store.state_dir import StateFolder
from dpsweep.tracking.mlflow import MlflowSink
from dpsweep.tracking.registry import _save_model, check_registry_names
from dpsweep.tracking.tracker import Tracker
from dpsweep.training.device import use_torch_defaults


@pytest.fixture
def make(tmp_path, sweep_file, really_trained):
    """Makes a sweep of one trial that was really trained; tracked, if asked for."""

    def made(*, void=False, tracked=False):
        state, sweep = (
            StateFolder.at(str(tmp_path / "state")),
            load_sweep(sweep_file, ["budget.trials=1"]),
        )
        study, folder = really_trained(sweep, state, void=void)
        if tracked:
            sink = MlflowSink(state.tracking_uri, sweep.name, folder.id, state.artifacts)
            tracker = Tracker(folder.path, sink)
            TrackingWatcher(tracker, study, folder).reconcile()
            assert tracker.close(120)
        return study, folder, state

    return made


def test_a_void_sweep_is_refused(make):
    with pytest.raises(StateError, match=r"is VOID: it used a fixed test secret.*--allow-void"):
        register_best(*make(void=True), "digits")


def test_a_void_sweeps_model_has_no_epsilon_to_filter_by(make):
    study, _, _ = make(void=True)
    tags = _tags(study.best()[0], void=True)
    assert (tags["epsilon"], tags["void"]) == ("none (void)", "true")


@pytest.mark.parametrize("name", ["a' or 'b", "a/b", "", "-x"])
def test_names_that_the_registry_could_mistake_are_refused(name):
    with pytest.raises(ConfigError, match="a model's name is"):
        check_registry_names(name, "champion")


@pytest.mark.parametrize("alias", ["latest", "v3", "1st", ""])
def test_aliases_that_the_registry_keeps_for_itself_are_refused(alias):
    with pytest.raises(ConfigError, match="an alias is"):
        check_registry_names("digits", alias)


NET = """
from torch import nn

class TheirNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x).tanh()  # in_their_words
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's and torch.export's own
def test_what_is_registered_tells_nothing_of_the_code_it_was_traced_from(tmp_path, monkeypatch):
    import mlflow

    private = tmp_path / "hospital_alpha"
    private.mkdir()
    (private / "their_net.py").write_text(NET)
    monkeypatch.syspath_prepend(private)
    model = import_module("their_net").TheirNet().eval()
    place = tmp_path / "stored"
    with use_torch_defaults():
        _save_model(model, torch.zeros(2, 4), place)
    stored = [path for path in place.rglob("*") if path.is_file()]
    parts = [path.read_bytes() for path in stored]
    for path in filter(is_zipfile, stored):
        with ZipFile(path) as archive:
            parts += [archive.read(name) for name in archive.namelist()]
    told = b"".join(parts)
    assert b"tanh" in told  # it is there, unpacked
    own = ["hospital_alpha", "their_net", "TheirNet", "in_their_words"]
    assert [word for word in (*own, str(tmp_path), mlflow.__file__) if word.encode() in told] == []
    images = torch.randn(5, 4)  # of another number than it was traced with
    torch.testing.assert_close(mlflow.pytorch.load_model(str(place))(images), model(images))


WORDS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, fields, num_classes):
        super().__init__()
        self.words, self.head = nn.Embedding(fields[0].num_ids, 3), nn.Linear(3, num_classes)

    def forward(self, input_ids, attention_mask):
        return self.head((self.words(input_ids) * attention_mask[:, :, None]).sum(1))

def make(fields, num_classes):
    return Net(fields, num_classes)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's and torch.export's own
def test_a_model_of_named_inputs_takes_them_stacked(tmp_path):
    import mlflow

    (tmp_path / "their_words.py").write_text(WORDS)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}')
    config = TrialConfig.model_validate(
        {
            "data": {
                **{"name": "text", "file": "x.csv", "text": "t", "label": "l", "num_train": 9},
                **{"validation": "holdout", "length": 4, "tokenizer": str(tmp_path)},
                "task": {"name": "regression", "range": [0, 10]},
            },
            "model": {"name": "own", "function": "their_words:make", "folder": str(tmp_path)},
            "privacy": {"epsilon": 1, "delta": 1e-2},
            "train": {"batch_size": 4, "epochs": 1},
            "method": {"name": "dp_sgd"},
        }
    )
    assert "attention_mask, stacked in this order" in _describe_inputs(config)
    assert config.data.task.outputs_words == "(y - 5) / 5 for a target y"
    model = ServedModel(config.model.build_for(config.data.spec), config).eval()
    with use_torch_defaults():
        _save_model(model, _make_example(config.data), tmp_path / "stored")
    ids = torch.tensor([[0, 1, 2, 2], [2, 1, 0, 0], [1, 1, 1, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    loaded = mlflow.pyfunc.load_model(str(tmp_path / "stored"))
    found = torch.from_numpy(loaded.predict(torch.stack([ids, mask], 1).numpy()))
    torch.testing.assert_close(found, model.model(ids, mask))
    assert found.shape == (3, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's and torch.export's own
def test_it_is_loaded_by_its_alias_and_predicts_what_the_trial_did(make):
    import mlflow

    study, folder, state = make(tracked=True)
    (found,) = register_best(study, folder, state, "digits")
    assert (found.version, found.uri) == ("1", "models:/digits@champion")
    (again,) = register_best(study, folder, state, "digits", alias="challenger")
    assert (again.version, "was registered before" in again.words) == ("1", True)

    client = mlflow.MlflowClient(state.tracking_uri)
    version = client.get_model_version_by_alias("digits", "champion")
    assert set(version.aliases) == {"champion", "challenger"}
    assert "(4.00, 3.4e-04)-differentially private" in version.description
    assert "Privacy of the search:" in version.description
    tags = version.tags
    assert (tags["epsilon"], tags["delta"], tags["void"]) == ("4.00", "3.4e-04", "false")
    assert tags["method"] == "fftkf"
    assert json.loads(tags["classes"]) == list("0123456789")
    assert client.get_run(version.run_id).data.tags["dpsweep.trial"] == "tiny/0"

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(state.tracking_uri)
    try:
        model = mlflow.pytorch.load_model("models:/digits@champion")
        served = mlflow.pyfunc.load_model("models:/digits@champion")
    finally:
        mlflow.set_tracking_uri(before)
    record = study.best()[0]
    data = load_dataset(record.config.data, record.config.seed)
    right = (model(data.valid_inputs).argmax(1) == data.valid_targets).double().mean()
    assert float(right) == pytest.approx(record.row["valid/accuracy"], abs=0.003)
    assert model(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)).shape == (3, 10)

    images = data.valid_inputs.numpy()
    assert images.dtype == np.uint8
    by_bytes, brightest = served.predict(images), record.config.data.spec.brightest
    for kind in (np.float32, np.float64):
        by_floats = served.predict((images / brightest).astype(kind))
        np.testing.assert_allclose(by_floats, by_bytes, atol=1e-5)
        assert (by_floats.argmax(1) == by_bytes.argmax(1)).all()
    json_bytes = np.array(images[:2].tolist())  # int64, as the scoring server reads JSON
    np.testing.assert_array_equal(served.predict(json_bytes), served.predict(images[:2]))
    assert "floats from 0 to 1" in version.description
    for wrong in (images.astype(np.float32), np.full((1, 1, 8, 8), 200, np.uint8)):
        with pytest.raises(RuntimeError, match=f"whole numbers from 0 to {brightest}, or floats"):
            served.predict(wrong)
