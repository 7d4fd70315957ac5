"""The script that users write today: Ray Tune, OptunaSearch, Opacus, MLflowLoggerCallback.

    python benchmarks/glue.py TRIALS FOLDER

The search of sweeps/digits_fftkf.yaml without early stopping: FFTKF on scikit-learn's digits at
epsilon 4, with the same model, steps, space and reports as that file. Written as the libraries' own
examples are: a function trainable that imports what it needs, per-sample gradients from
GradSampleModule, noise from get_noise_multiplier, two trials at a time. It has none of what
dpsweep adds: secrets, resume, a statement on the search.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.air.integrations.mlflow import MLflowLoggerCallback
from ray.tune.search import ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch

EPSILON, EPOCHS, REPORT_EVERY, CLIP = 4.0, 30, 3, 1.0


def trainable(config: dict[str, Any]) -> None:
    """One trial: Poisson batches, two gradients a step, a spectral shelf, a Kalman average."""
    import math

    import torch
    from opacus.accountants.utils import get_noise_multiplier
    from opacus.grad_sample import GradSampleModule
    from sklearn.datasets import load_digits
    from torch import nn

    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    labels = torch.from_numpy(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    x, y, x_test, y_test = images[~test], labels[~test], images[test], labels[test]
    num, batch = len(y), config["batch_size"]
    steps, rate = round(EPOCHS * num / batch), batch / num
    sigma = get_noise_multiplier(
        target_epsilon=EPSILON,
        target_delta=num**-1.1,
        sample_rate=rate,
        steps=steps,
        accountant="prv",
    )
    torch.manual_seed(0)
    model = GradSampleModule(
        nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 10)),
        )
    )
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=config["lr"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loss = nn.CrossEntropyLoss(reduction="sum")
    kappa, gamma = config["kappa"], config["gamma"]
    ahead = (1 - kappa) / (kappa * gamma)
    average, last = None, [torch.zeros_like(p) for p in params]

    def samples(chosen: torch.Tensor) -> list[torch.Tensor]:
        for p in params:
            p.grad = p.grad_sample = None
        loss(model(x[chosen]), y[chosen]).backward()
        return [p.grad_sample for p in params]

    for step in range(steps):
        chosen = torch.rand(num) < rate
        total = [torch.zeros_like(p) for p in params]
        if chosen.any():
            here = samples(chosen)
            with torch.no_grad():
                for p, d in zip(params, last, strict=True):
                    p.add_(gamma * d)
            there = samples(chosen)
            with torch.no_grad():
                for p, d in zip(params, last, strict=True):
                    p.sub_(gamma * d)
            both = [(1 - ahead) * a + ahead * b for a, b in zip(here, there, strict=True)]
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in both]).norm(dim=0)
            factor = (CLIP / (norms + 1e-6)).clamp(max=1.0)
            total = [torch.einsum("b,b...->...", factor, g) for g in both]
        noisy = [(g + sigma * CLIP * torch.randn_like(g)) / batch for g in total]
        flat = torch.cat([g.flatten() for g in noisy])
        spectrum = torch.fft.rfft(flat)
        spectrum[math.floor(config["cut"] * len(spectrum)) :] *= 1 - config["depth"]
        flat = torch.fft.irfft(spectrum, n=len(flat))
        average = flat if average is None else (1 - kappa) * average + kappa * flat
        before = [p.detach().clone() for p in params]
        for p, g in zip(params, average.split([p.numel() for p in params]), strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
        schedule.step()
        last = [p.detach() - b for p, b in zip(params, before, strict=True)]
        epoch = (step + 1) * rate
        if step + 1 == steps or int(epoch / REPORT_EVERY) > int((epoch - rate) / REPORT_EVERY):
            with torch.no_grad():
                accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
            tune.report({"accuracy": accuracy, "epoch": epoch})


def main(trials: int, folder: Path) -> None:
    """Runs the search and prints its seconds once Ray is up."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    start = time.perf_counter()
    found = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={
            "batch_size": tune.choice([128, 256, 512]),
            "lr": tune.loguniform(0.3, 6),
            "kappa": tune.uniform(0.3, 1.0),
            "gamma": tune.loguniform(0.2, 3),
            "depth": tune.uniform(0.0, 0.9),
            "cut": tune.uniform(0.05, 0.95),
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=trials,
            search_alg=ConcurrencyLimiter(OptunaSearch(seed=0), max_concurrent=2),
        ),
        run_config=tune.RunConfig(
            name="glue",
            storage_path=str(folder),
            verbose=0,
            callbacks=[
                MLflowLoggerCallback(
                    tracking_uri=f"sqlite:///{folder / 'mlflow.db'}", experiment_name="glue"
                )
            ],
        ),
    ).fit()
    seconds = time.perf_counter() - start
    best = found.get_best_result("accuracy", "max").metrics
    print(json.dumps({"trials": trials, "seconds": seconds, "best": best and best["accuracy"]}))
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]).absolute())
