"""An exported config loads back equal, says where it comes from, and overwrites nothing else."""

import pytest

from dpsweep.config.source import parse_yaml, read_yaml
from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import dump_trial, load_trial
from dpsweep.core.errors import StateError
from dpsweep.results.export import check_target, origin_of, to_yaml, write
from dpsweep.store.study import Study


@pytest.fixture
def study(tmp_path, sweep_file):
    """Two complete trials, the second one better."""
    study = Study.create(f"sqlite:///{tmp_path}/study.db", load_sweep(sweep_file))
    for accuracy in (0.6, 0.8):
        number = study.ask().number
        study.report(
            number,
            {
                "epoch": 2,
                "step": 22,
                "valid/accuracy": accuracy,
                "valid/loss": 1.0,
                "privacy/epsilon_spent": 3.99,
                "noise_multiplier": 1.07,
                "seconds": 1.0,
            },
        )
        study.tell(number, "complete")
    return study


def test_it_loads_back_equal_and_trains_by_itself(tmp_path, study):
    best = study.best()[0]
    write(tmp_path / "best.yaml", to_yaml(best, 1, origin_of(study)))
    assert load_trial(read_yaml(tmp_path / "best.yaml")) == best.config


def test_every_corner_of_a_conditional_space_loads_back_equal(sweep_file):
    space = """search={method: {one_of: [{name: dp_sgd}, {name: dp_adam}, {name: disk},
        {name: fftkf, rho: {uniform: [1.0e-7, 0.9]}}]}, optimizer.lr: {log_uniform: [1.0e-5, 9]}}"""
    for config in load_sweep(sweep_file, [space]).corners:
        assert load_trial(parse_yaml(dump_trial(config), "x")) == config


def test_the_header_tells_provenance_and_privacy(study):
    text = to_yaml(study.best()[0], 1, origin_of(study))
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    for fact in (
        "trial 1 of sweep tiny, number 1 of 2 by valid/accuracy",
        "valid/accuracy: 0.8 at epoch 2",
        "(4.00, 3.4e-04)-differentially private",
        "The search of 2 independent trials",
        "-DP by composition of the runs (PLD)",
        "noise_multiplier 1.07",
        "torch 2.",
        "dp-accounting 0.",
    ):
        assert fact in header


def test_another_file_is_left_alone_and_an_export_is_replaced(tmp_path, study):
    (tmp_path / "mine.yaml").write_text("precious: true\n")
    with pytest.raises(StateError, match=r"mine\.yaml: exists and is not one of our exports"):
        check_target(tmp_path / "mine.yaml")
    write(tmp_path / "best.yaml", to_yaml(study.best()[0], 1, origin_of(study)))
    check_target(tmp_path / "best.yaml")
    with pytest.raises(StateError, match=r"is a folder\. Name a file"):
        check_target(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be written"):
        check_target(tmp_path / "file" / "best.yaml")
