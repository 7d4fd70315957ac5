"""Small trials on digits, and directories to train them in."""

import shutil

import torch

from dpsweep.config.source import Source
from dpsweep.config.trial import load_trial
from dpsweep.training.trial_dir import TrialDir


def digits_trial(method, model=None, **train):
    """A trial of `cnn_small`, of circulant blocks where the method needs them."""
    circulant = {"width": 5, "block": 5} if method["name"] == "block_spectral_dp" else {"width": 4}
    tree = {
        "data": {"name": "digits"},
        "model": {"name": "cnn_small", **circulant, **(model or {})},
        "privacy": {"epsilon": 4},
        "train": {"batch_size": 300, "epochs": 1, **train},
        "optimizer": {"lr": 0.05},
        "method": method,
    }
    return load_trial(Source("trial", tree, {}))


def make_trial_dir(place, like=None):
    """A trial directory with a secret of its own, or that of another one."""
    trial_dir = TrialDir(place)
    if like is None:
        trial_dir.make_secret()
    else:
        shutil.copy(like.path / "secret", place / "secret")
    return trial_dir


def read_weights(trial_dir):
    return torch.load(trial_dir.weights, weights_only=True)
