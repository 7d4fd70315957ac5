"""Measure what rounding adds to the sensitivity: how far one more example moves all the others.

python benchmarks/rounding.py        # a row for each model, engine and precision

In exact arithmetic the clipped sum with one more example is the sum without it plus that example's
own clipped gradient. What is left of the difference, in clip norms, is no example's gradient, and
no clipping bounds it. The examples are scikit-learn's digits, and the one that comes and goes is
black, bright, or one of them, at the first place, in the middle or at the last.
"""

import sys
from itertools import product

import torch

from dpsweep.config.plan import plan_privacy
from dpsweep.config.trial import TrialConfig
from dpsweep.core.inputs import one_tensor
from dpsweep.core.seeds import Secret
from dpsweep.data.read import load_dataset
from dpsweep.training.assemble import assemble_step_on, initial_params
from dpsweep.training.step import Progress, Step

ENGINES = ("bookkeeping", "vmap", "opacus")


def measure_excess(model: str, engine: str, dtype: str, num: int = 1437) -> tuple[float, float]:
    """Largest move beyond the example's own gradient, and of the sum by portions of another size.

    Args:
        model: Name of a model.
        engine: Name of an engine.
        dtype: float32 or float64.
        num: Examples in the batch.

    Returns:
        Both in clip norms.
    """
    step = make_step(model, engine, dtype, 64)
    progress = step.start(initial_params(step))
    images, worst = one_tensor(step.data.inputs), 0.0
    kinds = [
        torch.zeros_like(images[0]),
        torch.full_like(images[0], step.data.brightest),
        images[0],
    ]
    for place, kind in product((0, num // 2, num - 1), kinds):
        images[place] = kind
        everyone = torch.arange(num)
        parts = [everyone, everyone[everyone != place], everyone[place : place + 1]]
        whole, others, own = (sum_flat(step, progress, part) for part in parts)
        worst = max(worst, float((whole - others - own).norm()))
    other = make_step(model, engine, dtype, 100)
    one_tensor(other.data.inputs)[:] = images
    moved = sum_flat(other, progress, torch.arange(num)) - sum_flat(
        step, progress, torch.arange(num)
    )
    return worst, float(moved.norm())


def make_step(model: str, engine: str, dtype: str, portion: int) -> Step:
    """Make a step with clip norm 1 on a copy of the digits, `portion` examples at once."""
    config = TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": model},
            "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0},
            "train": {
                "batch_size": 1024,
                "epochs": 1,
                "engine": engine,
                "dtype": dtype,
                "device": "cpu",
                "max_physical_batch": portion,
            },
            "method": {"name": "dp_sgd"},
        }
    )
    load_dataset.cache_clear()  # the images are overwritten
    data = load_dataset(config.data, 0)
    return assemble_step_on(data, plan_privacy(config), config, Secret.fixed("rounding"))


def sum_flat(step: Step, progress: Progress, batch: torch.Tensor) -> torch.Tensor:
    """Sum the clipped gradients of a batch, as one vector."""
    return torch.cat([x.flatten().double() for x in step.sum_clipped(batch, progress).values()])


def print_table(models: list[str]) -> None:
    """Print a row for each model, engine and precision."""
    torch.set_num_threads(1)
    print("| model | engine | dtype | one more example | portions of 100 for 64 |")
    print("|---|---|---|---|---|")
    for model, engine, dtype in product(models, ENGINES, ("float32", "float64")):
        example, portions = measure_excess(model, engine, dtype)
        print(f"| {model} | {engine} | {dtype} | {example:.1e} | {portions:.1e} |", flush=True)


if __name__ == "__main__":
    print_table(sys.argv[1:] or ["linear", "cnn_small", "vit_small"])
