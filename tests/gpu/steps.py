"""Whole steps of methods and models of the papers' size, on a GPU of shapes alone."""

from collections import namedtuple
from unittest import mock

import torch
from virtual import GIB, virtual_gpu

from dpsweep.config.plan import PrivacyPlan
from dpsweep.config.source import Source
from dpsweep.config.trial import load_trial
from dpsweep.core.seeds import Secret
from dpsweep.data.read import Dataset
from dpsweep.privacy.accounting import Run
from dpsweep.privacy.engine import make_unchecked_engine
from dpsweep.training.allowance import Allowance
from dpsweep.training.assemble import assemble_step_on, initial_params
from dpsweep.training.device import open_device

World = namedtuple("World", "method model batch_size augment", defaults=(1,))

METHODS = {
    "dp_sgd": {"name": "dp_sgd"},
    "dp_adam": {"name": "dp_adam"},
    "dp_adambc": {"name": "dp_adambc"},
    "doppler": {"name": "doppler"},
    "disk": {"name": "disk"},
    "fftkf": {"name": "fftkf"},
    "fftkf-split": {"name": "fftkf", "predictor": "split"},
    "dp_pmlf": {"name": "dp_pmlf", "points": 3},
    "innerouter": {"name": "innerouter", "points": 4},
    "spectral_dp": {"name": "spectral_dp"},
    "block_spectral_dp": {"name": "block_spectral_dp"},
}
MODELS = {
    "cnn5": {"name": "cnn5"},
    "wrn_16_4": {"name": "wrn_16_4"},
    "wrn_40_4": {"name": "wrn_40_4"},
    "vit_small": {"name": "vit_small"},
    "model2": {"name": "model2"},
    "features": {"name": "linear"},
    "circulant": {"name": "cnn_small", "width": 20, "block": 10},
}


def trial(world):
    copies = {"augment": {"flips": True, "crops": 4, "multiplicity": world.augment}}
    data = {"name": "cifar10"}
    if world.model == "features":
        data = {"name": "mnist", "features": {"name": "scattering", "groups": 27}}
    tree = {
        "data": data,
        "model": MODELS[world.model],
        "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0},
        "train": {
            "batch_size": world.batch_size,
            "epochs": 1,
            "device": "cuda",
            **(copies if world.augment > 1 else {}),
        },
        "optimizer": {"lr": 0.1},
        "method": METHODS[world.method],
    }
    return load_trial(Source("world", tree, {}))


def one_step(world, total=80 * GIB, gpu_share=1.0):
    """The ledger of one step at which all points of the query exist."""
    config = trial(world)
    num = 4 * world.batch_size
    spec = config.data.spec
    features = config.data.features is not None
    images = torch.zeros((num, *spec.shape), dtype=torch.float16 if features else torch.uint8)
    labels = torch.zeros(num, dtype=torch.int64)
    data = Dataset(images, labels, images[:10], labels[:10], spec.brightest, are_features=features)
    run = Run(world.batch_size / num, 1.0, 1000)
    with virtual_gpu(numbers=False, total=total) as gpu, unchecked():
        device = open_device("cuda", gpu_share)
        plan = PrivacyPlan(num, run, float("inf"), 1e-5)
        step = assemble_step_on(
            data.to(device), plan, config, Secret.fixed("test"), Allowance(gpu_share=gpu_share)
        )
        progress = step.start(initial_params(step))
        while len(progress.iterates) < progress.iterates.maxlen:
            progress.iterates.append({k: x.clone() for k, x in progress.params.items()})
        progress.step = len(progress.iterates)
        progress.leaf_sizes = leaf_sizes(step, progress)
        gpu.restart()
        step(progress)
        gpu.physical = step.engine.max_physical_batch
    return gpu


def leaf_sizes(step, progress):
    """What the step before would have learned: without it, no thread would draw the noise."""
    nobody = step.batch(0)[:0]
    return tuple(x.numel() for x in step.sum_clipped(nobody, progress).values())


def unchecked():
    """Leaves out the engine's checks, which compare numbers: there are none here."""

    def engine(model, loss, geometry, at_once, spec, choice, kind, copies, draw_targets, precision):
        return make_unchecked_engine(model, loss, geometry, at_once, choice, copies, precision)

    return mock.patch("dpsweep.training.assemble.make_engine", engine)
