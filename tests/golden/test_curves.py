"""Validation losses of the first 20 steps of every method, against those once stored here.

A change meant to leave numbers alone passes. One meant to change them is shown and stored by

    python tests/golden/test_curves.py

which rewrites the files of those that changed and prints how; show that in the pull request.
The secret is fixed, so these curves have no privacy.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.methods import METHODS
from dpsweep.training.assemble import assemble_step, initial_params
from dpsweep.training.evaluate import evaluate

FOLDER = Path(__file__).parent
STEPS = 20
TOLERANCE = 1e-9
"""Relative. Sums differ in their last bits between machines; a changed formula by far more."""

BLOCKS = {"model": {"name": "cnn_small", "width": 5, "block": 5}}
"""For the spectral methods."""

CURVES: dict[str, dict[str, Any]] = {
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
    "dp_sgd_per_layer": {
        "method": {"name": "dp_sgd"},
        "optimizer": {"lr": 1.0},
        "privacy": {
            "noise_multiplier": 0.8,
            "clipping": {"name": "per_layer", "bounds": {"0": 0.48, "3": 0.64, "7": 0.6}},
        },
    },
    "dp_sgd_adaptive": {
        "method": {"name": "dp_sgd"},
        "optimizer": {"lr": 1.0},
        "privacy": {
            "noise_multiplier": 0.8,
            "clipping": {"name": "adaptive", "quantile": 0.7, "rate": 0.3, "count_noise": 2.0},
        },
    },
    "dp_adambc": {"method": {"name": "dp_adambc"}, "optimizer": {"lr": 0.003, "floor": 1e-5}},
    "doppler": {
        "method": {"name": "doppler", "filter": {"published": "a9_b15_m05"}},
        "optimizer": {"lr": 1.0},
    },
    "doppler_design": {
        "method": {"name": "doppler", "filter": {"design": {"order": 3, "cutoff": 0.25}}},
        "optimizer": {"lr": 1.0, "momentum": 0.5},
    },
    "doppler_poles": {
        "method": {
            "name": "doppler",
            "filter": {
                "poles": [{"radius": 0.8}, {"radius": 0.5, "angle": 1.0}],
                "zeros": [{"radius": 1.0, "angle": 3.1416}],
            },
        },
        "optimizer": {"name": "adambc", "lr": 0.003, "floor": 1e-5},
    },
    "disk_riccati": {
        "method": {"name": "disk", "gain": "riccati", "process": 0.3, "gamma": "one_point"},
        "optimizer": {"lr": 1.0},
    },
    "fftkf_split": {
        "method": {"name": "fftkf", "kappa": 0.7, "predictor": "split", "split_share": 0.3},
        "optimizer": {"lr": 1.0},
    },
    "fftkf_butterworth": {
        "method": {
            "name": "fftkf",
            "predictor": "none",
            "shape": "butterworth",
            "scope": "tensor",
            "sharpness": 3.0,
        },
        "optimizer": {"lr": 1.0},
    },
    "innerouter": {
        "method": {"name": "innerouter", "points": 3, "decay": 0.7, "outer_decay": 0.8},
        "optimizer": {"lr": 0.2},
    },
    "dp_pmlf": {
        "method": {
            "name": "dp_pmlf",
            "points": 4,
            "decay": 0.8,
            "filter": {"published": "a7_2_b05_05"},
        },
        "optimizer": {"lr": 1.0},
    },
    "spectral_dp": {**BLOCKS, "method": {"name": "spectral_dp"}, "optimizer": {"lr": 1.0}},
    "spectral_dp_flat": {
        **BLOCKS,
        "method": {"name": "spectral_dp", "keep": 0.75},
        "optimizer": {"name": "adambc", "lr": 0.003, "floor": 1e-5},
        "privacy": {"noise_multiplier": 0.8, "clip_norm": 0.5, "clipping": "flat"},
    },
    "block_spectral_dp": {
        **BLOCKS,
        "method": {"name": "block_spectral_dp"},
        "optimizer": {"lr": 1.0},
    },
    "bandmf": {"method": {"name": "bandmf", "bands": 4}, "optimizer": {"lr": 1.0}},
    "dp_ftrl": {"method": {"name": "dp_ftrl", "buffers": 1}, "optimizer": {"lr": 1.0}},
    "compose": {
        **BLOCKS,
        "method": {
            "compose": {
                "query": {"name": "momentum", "points": 2, "decay": 0.5},
                "filters": [
                    {"name": "shelf", "cut": 0.4, "depth": 0.6},
                    {"name": "low_pass", "published": "a6_b4"},
                    {"name": "riccati", "process": 0.5},
                ],
                "base": "adambc",
                "geometry": {"name": "spectral", "keep": 0.6, "keep_circulant": 0.4},
            }
        },
        "optimizer": {"lr": 0.003, "floor": 1e-5},
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
    step = assemble_step(config(name), Secret.fixed("golden"), torch.device("cpu"))
    progress = step.start(initial_params(step))
    for _ in range(step.plan.steps):
        step(progress)
        yield evaluate(step.engine.model, progress.params, step.data, torch.float64)["loss"]


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
