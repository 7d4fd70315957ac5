"""Checks of doctor about GPUs: which torch sees, and whether trials can share one.

With --gpu, whether a trial trains.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from dpsweep.cli.verbs.doctor.context import DoctorContext, Finding
from dpsweep.config.source import Source
from dpsweep.config.trial import load_trial
from dpsweep.core.disk import format_bytes
from dpsweep.core.errors import ConfigError
from dpsweep.core.types import Tensors
from dpsweep.training.allowance import Allowance
from dpsweep.training.device import open_device
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

_TRIAL = {
    "data": {"name": "digits"},
    "model": {"name": "cnn_small", "width": 4},
    "privacy": {"epsilon": 4},
    # portions that two GPUs can share, so that they add up the same numbers as one
    "train": {"batch_size": 128, "epochs": 1, "device": "cuda", "max_physical_batch": 64},
    "optimizer": {"lr": 1.0},
    "method": {"name": "disk"},
}
_SHARE = 0.5


def gpus(context: DoctorContext) -> Iterator[Finding]:
    """List the GPUs that torch sees, and compute one number on the first."""
    count = torch.cuda.device_count()
    if count and torch.cuda.is_available():
        try:
            torch.zeros(1, device=open_device("cuda")).sum().item()
        except RuntimeError as e:
            words = f"{count} visible, and nothing can be computed: {str(e).splitlines()[0]}"
            yield Finding("gpu", "fail", words, "See the driver's log and nvidia-smi")
            return
        names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
        yield Finding("gpu", "ok", f"{count} visible: {', '.join(names)}")
        yield _check_mps()
    elif shutil.which("nvidia-smi"):
        yield Finding(
            "gpu",
            "warn",
            "nvidia-smi is here, and torch sees no GPU",
            "Look at CUDA_VISIBLE_DEVICES and the driver, and install a torch with CUDA",
        )
    elif os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        yield Finding("gpu", "ok", "CUDA_VISIBLE_DEVICES hides all: trials run on CPUs")
    else:
        yield Finding("gpu", "ok", "none: trials run on CPUs")


def _check_mps() -> Finding:
    """Look for NVIDIA's Multi-Process Service, without which trials on one GPU take turns."""
    check, control = "gpu sharing (MPS)", "nvidia-cuda-mps-control"
    if shutil.which(control) is None:
        return Finding(
            check,
            "ok",
            f"no {control}: trials at shares of a GPU take turns. It comes with the driver",
        )
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if (pipes / "control").exists():
        return Finding(check, "ok", f"runs, with its pipes in {pipes}")
    return Finding(
        check,
        "warn",
        f"not started (no pipe in {pipes}): trials at shares of a GPU, such as resources.gpu: "
        f"0.25, take turns",
        f"To share GPUs, on each node before Ray: export CUDA_MPS_PIPE_DIRECTORY=$HOME/mps "
        f"CUDA_MPS_LOG_DIRECTORY=$HOME/mps-log; {control} -d",
    )


def gpu_trial(context: DoctorContext) -> Iterator[Finding]:
    """Train one small trial twice on the GPU, from the same secret, as a worker would.

    Digits, one epoch. A step that is replayed after a crash must release the same again, so the
    two must agree in every bit.
    """
    if not context.gpu:
        return
    with tempfile.TemporaryDirectory(prefix="dpsweep-doctor-") as place:
        folder = Path(place)
        TrialDir(folder / "first").make_secret()
        try:
            open_device("cuda", key="--gpu")
            torch.cuda.reset_peak_memory_stats()
            first, second = _train(folder, "first"), _train(folder, "second")
        except (ConfigError, RuntimeError) as e:
            words = f"a trial fails: {str(e).splitlines()[0]}"
            yield Finding("gpu trial", "fail", words, "Every trial on this GPU would fail so")
            return
        yield Finding("gpu trial", "ok", "a trial trains; float32 is IEEE, without TF32")
        yield _compare("gpu determinism", "two trials with one secret", first, second)
        total = torch.cuda.mem_get_info()[1]
        peak = torch.cuda.max_memory_reserved()
        words = f"{format_bytes(peak)} of {format_bytes(total)} taken, {_SHARE:.0%} allowed"
        over = peak > _SHARE * total
        yield Finding("gpu memory", "fail" if over else "ok", words)
        if torch.cuda.device_count() < 2:
            return
        check = "gpu batch sharing"
        try:
            shared = _train(folder, "shared", num_devices=2)
        except ConfigError as e:  # GPUs of several kinds
            yield Finding(check, "warn", str(e), "Trials with resources.gpu: 2 or more fail so")
        except RuntimeError as e:
            words = f"a trial on two GPUs fails: {str(e).splitlines()[0]}"
            yield Finding(check, "fail", words, "Every trial with resources.gpu: 2 would fail so")
        else:
            yield _compare(check, "a trial on one GPU and on two", first, shared)


def _compare(check: str, what: str, one: Tensors, two: Tensors) -> Finding:
    """Compare the weights of two trials with one secret."""
    other = [name for name, x in one.items() if not torch.equal(x, two[name])]
    if not other:
        return Finding(check, "ok", f"{what} agree in every bit")
    return Finding(
        check,
        "fail",
        f"{what} differ in {', '.join(other)}",
        "A resumed trial would release other numbers than it did: report this GPU and driver",
    )


def _train(folder: Path, name: str, num_devices: int = 1) -> Tensors:
    """Train a trial with the secret of the first one, and return its weights."""
    config = load_trial(Source("doctor --gpu", _TRIAL, {}))
    trial_dir = TrialDir(folder / name)
    if name != "first":
        shutil.copy(folder / "first" / "secret", trial_dir.path / "secret")
    allowance = Allowance(gpu_share=_SHARE, num_devices=num_devices)
    train(config, trial_dir, lambda row: None, allowance=allowance)
    weights: Tensors = torch.load(trial_dir.weights, weights_only=True)
    return weights
