"""Winners as files: what the command line writes, and what runs without us."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpsweep.config.source import Source, read_yaml
from dpsweep.config.sweep import parse_sweep
from dpsweep.config.trial import load_trial
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.results.formats import export_best
from dpsweep.store.state_dir import StateFolder
from dpsweep.training.trial_dir import TrialDir

SPEC = {
    "name": "tiny",
    "base": {
        "data": {"name": "digits"},
        "model": {"name": "cnn_small", "width": 4},
        "privacy": {"epsilon": 4},
        "train": {"batch_size": 128, "epochs": 2},
        "optimizer": {"lr": 1.0},
        "method": {"name": "dp_sgd"},
    },
    "search": {"optimizer.lr": {"uniform": [1, 2]}},
    "budget": {"trials": 1},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory, really_trained):
    """A study of one trial of DP-SGD, really trained, and its folder."""
    state = StateFolder.at(str(tmp_path_factory.mktemp("sweep") / "state"))
    return really_trained(parse_sweep(Source("spec", SPEC, {}), Path()), state)


@pytest.fixture
def weights(found):
    """The weights that were kept, put back after the test."""
    place = TrialDir(found[1].trial_dir(0)).weights
    kept = place.read_bytes()
    yield place
    place.write_bytes(kept)


def test_a_script_that_checks_accuracy_needs_one(really_trained, tmp_path):
    data = {"name": "digits", "task": {"name": "classification", "metrics": ["f1"]}}
    base = {**SPEC["base"], "data": data}
    spec = {**SPEC, "base": base, "objective": {"metric": "valid/f1"}}
    state = StateFolder.at(str(tmp_path / "state"))
    found = really_trained(parse_sweep(Source("spec", spec, {}), Path()), state)
    with pytest.raises(ConfigError, match=r"data.task.metrics: .* this sweep measured f1, loss"):
        export_best(*found, tmp_path / "best", "torch")


def test_yaml_loads_back(found, tmp_path):
    study, folder = found
    (file,) = export_best(study, folder, tmp_path / "best")
    assert file.path.name == "01-trial-0000.yaml"
    assert load_trial(read_yaml(file.path)) == study.best()[0].config


def test_a_script_says_on_top_what_is_promised_and_replaces_itself_alone(found, tmp_path):
    study, folder = found
    for _ in range(2):
        (file,) = export_best(study, folder, tmp_path / "best", "opacus")
    text = " ".join(line.lstrip("# ") for line in file.path.read_text().splitlines())
    assert text.startswith("dpsweep export: trial 0 of sweep tiny, number 1 of 1")
    assert "(4.00, 3.4e-04)-differentially private" in text
    assert "is one more release of the same data" in text
    file.path.write_text("print('mine')\n")
    with pytest.raises(StateError, match="is not one of our exports"):
        export_best(study, folder, tmp_path / "best", "opacus")


def test_the_torch_script_reaches_the_reported_accuracy(found, tmp_path):
    study, folder = found
    (file,) = export_best(study, folder, tmp_path / "best", "torch")
    accuracy = study.best()[0].row["valid/accuracy"]
    assert file.words.endswith(f"checked: accuracy {accuracy:.4f}")


@pytest.mark.slow
def test_the_torch_script_reaches_the_reported_accuracy_without_us(found, tmp_path):
    study, folder = found
    (file,) = export_best(study, folder, tmp_path / "best", "torch")
    accuracy = study.best()[0].row["valid/accuracy"]
    (file.path.parent / "dpsweep.py").write_text("raise SystemExit('dpsweep was imported')")
    done = subprocess.run(
        [sys.executable, file.path.name, "--check"],
        cwd=file.path.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"accuracy {accuracy:.4f}, and {accuracy:.4f} when it was trained\n"


def test_other_weights_than_were_reported_are_not_handed_out(found, weights, tmp_path):
    study, folder = found
    torch.save({k: -x for k, x in torch.load(weights).items()}, weights)
    with pytest.raises(StateError, match="Its data or its weights are others"):
        export_best(study, folder, tmp_path / "best", "torch")


def test_weights_that_were_not_kept_are_named_with_a_remedy(found, weights, tmp_path):
    study, folder = found
    weights.unlink()
    with pytest.raises(StateError, match=r"weights of trial 0 are not kept.*dpsweep train"):
        export_best(study, folder, tmp_path / "best", "torch")


def test_an_unknown_format_is_told_with_the_known_ones(found, tmp_path):
    known = "huggingface, opacus, torch, yaml"
    with pytest.raises(ConfigError, match=rf"unknown format 'onnx'.*Known: {known}"):
        export_best(*found, tmp_path / "best", "onnx")


def test_on_the_command_line_an_export_to_nowhere_is_refused():
    from dpsweep.cli.verbs import export

    with pytest.raises(ConfigError, match="Give -o FOLDER, or --register NAME"):
        export.export(
            "tiny",
            None,
            None,
            out=None,
            kind="yaml",
            top=1,
            register=None,
            alias="champion",
            allow_void=False,
        )
