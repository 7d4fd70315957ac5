"""A process computes on the device, with the share and in the precision that it was told."""

import json
import subprocess
import sys
import threading

import pytest
import torch
from race import Race, make_runner
from typer.testing import CliRunner
from virtual import GIB, virtual_gpu

from dpsweep.cli import app
from dpsweep.core.errors import ConfigError
from dpsweep.execution import gpu_probe as probe
from dpsweep.training.device import open_device, use_torch_defaults

ROUNDING = {
    "nothing": "",
    "the legacy flags": (
        "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True"
    ),
    "the matmul precision": "torch.set_float32_matmul_precision('medium')",
    "the key for all": "torch.backends.fp32_precision = 'tf32'",
    "the key of oneDNN": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
}
CHECK = """
import os, sys
import torch
from dpsweep.training.device import open_device
for before in sys.argv[1:]:
    if pid := os.fork():  # each begins with torch as it was imported
        failed = os.waitpid(pid, 0)[1]
        assert not failed, before
        continue
    exec(before)
    assert open_device("cpu") == torch.device("cpu")
    b = torch.backends
    keys = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn)
    assert [key.fp32_precision for key in keys] == ["ieee"] * 6
    torch.manual_seed(0)
    a = torch.randn(64, 4096)
    exact = (a.double() @ a.double().T)
    assert ((a @ a.T) - exact).abs().max() < 1e-3 # bfloat16 is off by 0.1 here
    break
"""


def test_float32_is_ieee_whatever_was_set_before():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK, *ROUNDING.values()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_cuda_has_an_index_and_its_share():
    with virtual_gpu() as gpu:
        assert open_device("auto", 0.25) == torch.device("cuda", 0)
        assert gpu.fraction == 0.25
        assert open_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_device_is_refused_by_the_key_that_asked_for_it():
    with pytest.raises(ConfigError, match=r"--device: cuda, and torch sees no CUDA device"):
        open_device("cuda", key="--device")
    assert open_device("auto") == torch.device("cpu")


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")  # of Opacus
@pytest.mark.parametrize("name", ["sgd", "opacus", "dp_sgd"])
def test_bench_runs_on_cuda_and_times_peers_under_torchs_own_settings(name):
    race = Race("digits", {"name": "cnn_small", "width": 2}, 16, device="cuda")
    with virtual_gpu() as gpu:
        take = make_runner(race, name)
        gpu.restart()
        take()
        assert gpu.launches
        assert gpu.mixed == []
    open_device("cpu")
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    with use_torch_defaults():
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"


def test_the_probe_measures_under_the_share_that_a_trial_will_get(monkeypatch):
    monkeypatch.setattr(probe, "_ready", threading.Barrier(1))
    monkeypatch.setattr(probe, "_SECONDS", 0.0)
    config = Race("digits", {"name": "cnn_small", "width": 2}, 16).config("disk")
    with virtual_gpu() as gpu:
        seconds, held, total = probe._probe(config.model_dump(mode="json"), 1, "cuda", 0.45)
    assert gpu.fraction == 0.45
    assert seconds > 0
    assert 0 < held < total == 80 * GIB


def test_doctor_trains_a_trial_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with virtual_gpu() as gpu:
        result = CliRunner().invoke(app, ["doctor", "--gpu", "--json"])
    found = {row["check"]: row for row in json.loads(result.output)}
    assert result.exit_code == 0
    assert found["gpu trial"]["level"] == "ok"
    assert found["gpu determinism"]["level"] == "ok"
    assert found["gpu memory"]["level"] == "ok"
    assert "gpu batch sharing" not in found, "one card shares with none"
    assert gpu.fraction == 0.5
    assert gpu.mixed == []


def test_doctor_looks_for_the_service_that_lets_trials_share_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))

    def look():
        with virtual_gpu():
            result = CliRunner().invoke(app, ["doctor", "--json"])
        found = {row["check"]: row for row in json.loads(result.output)}
        return found["gpu sharing (MPS)"]

    assert "no nvidia-cuda-mps-control" in look()["words"]
    control = tmp_path / "nvidia-cuda-mps-control"
    control.touch(0o755)
    found = look()
    assert found["level"] == "warn"
    assert "not started (no pipe in" in found["words"]
    assert "CUDA_MPS_PIPE_DIRECTORY=$HOME/mps" in found["remedy"]
    assert "nvidia-cuda-mps-control -d" in found["remedy"]
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    assert look()["level"] == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_doctor_says_that_there_is_no_gpu_to_train_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--gpu", "--json"])
    found = {row["check"]: row for row in json.loads(result.output)}
    assert result.exit_code == 1
    assert "--gpu: cuda, and torch sees no CUDA device" in found["gpu trial"]["words"]
