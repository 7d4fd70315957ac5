"""Validation losses of the first 20 steps of every method, against those once stored here.

A change meant to leave numbers alone passes. One meant to change them is shown and stored by

    python tests/golden/test_curves.py

which rewrites the files of those that changed and prints how; show that in the pull request.
The secret is fixed, so these curves have no privacy.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.data.models import build
from dpsweep.data.read import load
from dpsweep.methods import METHODS
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.train.budget import budget
from dpsweep.train.evaluate import evaluate
from dpsweep.train.step import Step

FOLDER = Path(__file__).parent
STEPS = 20
TOLERANCE = 1e-9
"""Relative. Sums differ in their last bits between machines; a changed formula by far more."""

CURVES = {
    "dp_sgd": {"method": {"name": "dp_sgd"}, "optimizer": {"lr": 1.0}},
    "dp_adam": {"method": {"name": "dp_adam"}, "optimizer": {"lr": 0.01}},
    "disk": {"method": {"name": "disk", "kappa": 0.7, "gamma": 0.5}, "optimizer": {"lr": 1.0}},
    "disk_one_point": {
        "method": {"name": "disk", "kappa": 0.5, "gamma": 1.0},
        "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
    },
    "fftkf": {
        "method": {"name": "fftkf", "kappa": 0.7, "gamma": 0.5, "cut": 0.5, "depth": 0.5},
        "optimizer": {"lr": 1.0, "schedule": {"name": "cosine", "warmup": 0.2, "final": 0.1}},
    },
    "fftkf_automatic": {
        "method": {"name": "fftkf", "kappa": 0.4, "gamma": -1.0, "cut": 0.3, "depth": 0.75},
        "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5},
        "privacy": {"noise_multiplier": 1.5, "clip_norm": 0.5, "clipping": "automatic"},
    },
}


def config(name: str) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small", "width": 3},
            "privacy": {"noise_multiplier": 0.8},
            "train": {
                "batch_size": 64,
                "epochs": STEPS * 64 / 1437,
                "max_physical_batch": 40,
                "device": "cpu",
                "dtype": "float64",
            },
            "seed": 11,
            **CURVES[name],
        }
    )


def curve(name: str) -> Iterator[float]:
    """The validation loss after each step."""
    trial = config(name)
    data, model = load(trial.data, trial.seed), build(trial.model, trial.data.spec, trial.seed)
    model = model.double()
    engine = VmapEngine(model, nn.functional.cross_entropy, trial.train.max_physical_batch)
    step = Step(trial, budget(trial), data, engine, Secret.fixed("golden"))
    progress = step.start({k: p.detach().clone() for k, p in model.named_parameters()})
    for _ in range(step.budget.run.steps):
        step(progress)
        yield evaluate(model, progress.params, data, torch.float64).loss


def stored(name: str) -> list[float]:
    """The curve on disk; empty if there is none yet."""
    place = FOLDER / f"{name}.json"
    return json.loads(place.read_text()) if place.exists() else []


@pytest.mark.parametrize("name", CURVES)
def test_losses_are_those_stored(name):
    assert list(curve(name)) == pytest.approx(stored(name), rel=TOLERANCE, abs=0)


def test_every_method_has_a_curve_of_twenty_steps_and_no_file_is_left_over():
    assert {config(name).method.name for name in CURVES} == set(METHODS)
    assert {place.stem for place in FOLDER.glob("*.json")} == set(CURVES)
    assert {len(stored(name)) for name in CURVES} == {STEPS}


def regenerate() -> None:
    """Stores the curves that changed and prints how."""
    for name in CURVES:
        old, new = stored(name), list(curve(name))
        pairs = list(zip(old or new, new, strict=True))
        worst = max(abs(after / before - 1) for before, after in pairs)
        if old and worst <= TOLERANCE:
            print(f"{name}: as it was, to {worst:.0e}")
            continue
        print(f"{name}: " + (f"CHANGED by up to {worst:.1e}" if old else "NEW"))
        for t, (before, after) in enumerate(pairs):
            print(f"    step {t:2d}    {before:.12f} -> {after:.12f}")
        (FOLDER / f"{name}.json").write_text(json.dumps(new, indent=0) + "\n")


if __name__ == "__main__":
    regenerate()
