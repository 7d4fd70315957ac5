"""A sweep checks what its step releases before its first trial, and keeps the result."""

import pytest

import dpsweep.training.step
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.execution.release_check import store_release_checks
from dpsweep.execution.tracking import CHECKS
from dpsweep.store.state_dir import StateFolder


def test_result_is_kept_beside_the_privacy_statement(sweep_file, tmp_path):
    sweep, folder = load_sweep(sweep_file), StateFolder(tmp_path / "state").sweep("tiny")
    folder.path.mkdir(parents=True)
    store_release_checks(sweep, folder)
    text = (folder.path / CHECKS).read_text()
    for name in ("noise", "sensitivity", "divisor", "sampling"):
        assert f"| {name} |" in text
    assert "VIOLATED" not in text


def test_sweep_whose_noise_is_too_weak_is_refused(sweep_file, tmp_path, monkeypatch):
    sound = dpsweep.training.step.release

    def weakened(total, *, noise_multiplier, **rest):
        return sound(total, noise_multiplier=0.9 * noise_multiplier, **rest)

    monkeypatch.setattr(dpsweep.training.step, "release", weakened)
    sweep, folder = load_sweep(sweep_file), StateFolder(tmp_path / "state").sweep("tiny")
    folder.path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"does not release what.*noise .* standard errors"):
        store_release_checks(sweep, folder)
    assert not (folder.path / CHECKS).exists(), "checked again by the next launch"
