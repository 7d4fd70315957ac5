"""Checks of doctor about GPUs: which torch sees, and with --gpu, whether a trial trains."""

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
    "train": {"batch_size": 128, "epochs": 1, "device": "cuda"},
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


def gpu_trial(context: DoctorContext) -> Iterator[Finding]:
    """Train one small trial twice on the GPU, from the same secret, as a worker would.

    Digits, one epoch. A step that is replayed after a crash must release the same again, so the
    two must agree in every bit.
    """
    if not context.gpu:
        return
    try:
        open_device("cuda", key="--gpu")
        weights = _train_twice()
    except (ConfigError, RuntimeError) as e:
        words = f"a trial fails: {str(e).splitlines()[0]}"
        yield Finding("gpu trial", "fail", words, "Every trial on this GPU would fail so")
        return
    yield Finding("gpu trial", "ok", "a trial trains; float32 is IEEE, without TF32")
    other = [name for name, x in weights[0].items() if not torch.equal(x, weights[1][name])]
    if other:
        yield Finding(
            "gpu determinism",
            "fail",
            f"two trials with one secret differ in {', '.join(other)}",
            "A resumed trial would release other numbers than it did: report this GPU and driver",
        )
    else:
        yield Finding("gpu determinism", "ok", "two trials with one secret agree in every bit")
    total = torch.cuda.mem_get_info()[1]
    peak = torch.cuda.max_memory_reserved()
    words = f"{format_bytes(peak)} of {format_bytes(total)} taken, {_SHARE:.0%} allowed"
    over = peak > _SHARE * total
    yield Finding("gpu memory", "fail" if over else "ok", words)


def _train_twice() -> list[Tensors]:
    """The weights of two trials with the same secret."""
    config = load_trial(Source("doctor --gpu", _TRIAL, {}))
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(prefix="dpsweep-doctor-") as folder:
        trial_dirs = [TrialDir(Path(folder) / name) for name in ("first", "second")]
        trial_dirs[0].make_secret()
        shutil.copy(trial_dirs[0].path / "secret", trial_dirs[1].path / "secret")
        for trial_dir in trial_dirs:
            train(config, trial_dir, lambda row: None, allowance=Allowance(gpu_share=_SHARE))
        return [torch.load(trial_dir.weights, weights_only=True) for trial_dir in trial_dirs]
