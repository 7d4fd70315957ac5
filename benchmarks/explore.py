"""Ways to spend one epsilon on a search, over many whole searches of a linear model.

    python benchmarks/explore.py --sweeps 40
    python benchmarks/explore.py --steps sgd      # best step at each noise level; or adam, adambc

DP-SGD on the digits (batch 256, 30 epochs, cosine schedule) in numpy, with the noise multipliers
that dpsweep gives: a run takes 0.02 s, so that many whole searches can be averaged. Searched are
total step (a factor 16 each way) and clip norm. Printed is the test accuracy of the model handed
out, its mean over the searches with its standard error.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial

import numpy as np
from sklearn.datasets import load_digits

from dpsweep.privacy.accounting import calibrate_noise
from dpsweep.privacy.search_budget import SearchBudget, explore_noise

BATCH, EPOCHS, EPSILON = 256, 30, 4.0
STEP, FACTOR, CLIP = 640.0, 16.0, (0.1, 1.0)
"""Known-good total step lr C T, how far it is searched each way, and the range of C."""

Point = tuple[float, float]
"""Total step and clip norm."""


def read_digits() -> tuple[np.ndarray, ...]:
    """Training and test examples with a constant column, and their classes."""
    inputs, targets = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(inputs))
    inputs = np.c_[inputs[order] / 16 - 0.3, np.ones(len(inputs))]
    return inputs[360:], targets[order][360:], inputs[:360], targets[order][:360]


INPUTS, TARGETS, TEST, TEST_TARGETS = read_digits()
NUM, ONE_HOT = len(INPUTS), np.eye(10)[TARGETS]
NORMS = np.linalg.norm(INPUTS, axis=1)
RATE, STEPS, DELTA = BATCH / NUM, round(EPOCHS * NUM / BATCH), NUM**-1.1


def train(point: Point, sigma: float, rng: np.random.Generator, name: str = "sgd") -> float:
    """Test accuracy of one private run, by SGD, Adam or AdamBC."""
    total, clip = point
    lr = total / (clip * STEPS * 0.5)  # the cosine's mean is 1/2
    weights = np.zeros((INPUTS.shape[1], 10))
    mean, square = np.zeros_like(weights), np.zeros_like(weights)
    for t in range(STEPS):
        drawn = np.flatnonzero(rng.random(NUM) < RATE)
        scores = INPUTS[drawn] @ weights
        shares = np.exp(scores - scores.max(1, keepdims=True))
        errors = shares / shares.sum(1, keepdims=True) - ONE_HOT[drawn]
        norms = np.linalg.norm(errors, axis=1) * NORMS[drawn]
        errors *= np.minimum(1, clip / np.maximum(norms, 1e-12))[:, None]
        noise = sigma * clip * rng.standard_normal(weights.shape)
        released = (INPUTS[drawn].T @ errors + noise) / BATCH
        if name != "sgd":
            mean, square = 0.9 * mean + 0.1 * released, 0.999 * square + 0.001 * released**2
            second = square / (1 - 0.999 ** (t + 1))
            if name == "adambc":
                noise_variance = (sigma * clip / BATCH) ** 2
                second = np.maximum(second - noise_variance, 2 * noise_variance)  # its default
            released = mean / (1 - 0.9 ** (t + 1)) / (np.sqrt(second) + 1e-8)
        weights -= lr * 0.5 * (1 + math.cos(math.pi * t / STEPS)) * released
    return float((np.argmax(TEST @ weights, 1) == TEST_TARGETS).mean())


def draw(rng: np.random.Generator, low: float = 1 / FACTOR) -> Point:
    """A random point of the space; `low` is the least total step, in units of the known one."""
    total = STEP * math.exp(rng.uniform(math.log(low), math.log(FACTOR)))
    return total, math.exp(rng.uniform(*np.log(CLIP)))


def best(points: list[Point], sigma: float, rng: np.random.Generator, fit: float = 1.0) -> Point:
    """The point whose run, with a step `fit` times as large, came out best."""
    found = [train((fit * total, clip), sigma, rng) for total, clip in points]
    return points[int(np.argmax(found))]


def explore(rng: np.random.Generator, num: int, share: float, rule: str) -> float:
    """Accuracy of the final run after `num` exploring trials."""
    levels = explore_noise(EPSILON, DELTA, (STEPS, RATE), num, share)
    ratio = levels[1] / levels[0]
    if rule == "scaled":  # what dpsweep does
        chosen = best([draw(rng) for _ in range(num)], levels[0], rng, ratio)
    elif rule == "unscaled":
        chosen = best([draw(rng) for _ in range(num)], levels[0], rng)
    else:
        chosen = extrapolated(rng, num, levels, ratio / FACTOR)
    return train(chosen, levels[1], rng)


def extrapolated(
    rng: np.random.Generator, num: int, levels: tuple[float, float], low: float
) -> Point:
    """Panda et al. 2024: the best total steps at two noise levels, on a line over 1 / sigma.

    Half of the trials get 1/5 of the share, the others 4/5.
    """
    loud, quiet = levels[0] * 2.5**0.5, levels[0] / 1.6**0.5
    firsts, seconds = ([draw(rng, low) for _ in range(num // 2)] for _ in range(2))
    one, other = best(firsts, loud, rng), best(seconds, quiet, rng)
    slope = (other[0] - one[0]) / (1 / quiet - 1 / loud)
    total = other[0] + slope * (1 / levels[1] - 1 / quiet)
    return min(max(total, STEP * low), STEP * FACTOR), other[1]


def equal_shares(rng: np.random.Generator, num: int) -> float:
    """Accuracy, on fresh noise, of the best of `num` trials with equal shares."""
    sigma = calibrate_noise(EPSILON, DELTA, RATE, STEPS * num)[0].noise_multiplier
    return train(best([draw(rng) for _ in range(num)], sigma, rng), sigma, rng)


def select_privately(rng: np.random.Generator, mean: int) -> float:
    """Accuracy, on fresh noise, of a private selection's winner."""
    whole = SearchBudget("private_selection", EPSILON, DELTA, mean, ((STEPS, RATE),), vary=False)
    sigma = whole.noise((STEPS, RATE))
    points = [draw(rng) for _ in range(rng.geometric(1 / mean))]
    return train(best(points, sigma, rng), sigma, rng)


def show_steps(name: str) -> None:
    """Prints the accuracy in % at each noise level (rows) and learning rate (columns), C 0.5."""
    levels = (1.5, 3, 6, 12, 24, 48) if name == "sgd" else (2, 8, 32)
    for sigma in levels:
        found = {}
        for k in range(2, 13) if name == "sgd" else range(-10, 1):
            total = 2.0**k if name == "sgd" else 2.0**k * 0.25 * STEPS  # lr 2^k for Adam
            runs = [train((total, 0.5), sigma, np.random.default_rng(i), name) for i in range(6)]
            found[k] = 100 * float(np.mean(runs))
        shown = " ".join(f"{accuracy:5.1f}" for accuracy in found.values())
        print(f"noise {sigma:4g}: {shown}   best at 2^{max(found, key=found.__getitem__)}")


def main() -> None:
    """Prints one line a way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", type=int, default=40, help="whole searches averaged")
    parser.add_argument("--steps", choices=("sgd", "adam", "adambc"), help="one run at a time")
    options = parser.parse_args()
    if options.steps:
        show_steps(options.steps)
        return
    num_sweeps = options.sweeps
    ways: dict[str, Callable[[np.random.Generator], float]] = {
        f"equal shares, {n} trials": partial(equal_shares, num=n) for n in (1, 2, 3, 8, 16)
    }
    ways |= {
        f"private selection, {n} on average": partial(select_privately, mean=n) for n in (3, 8, 16)
    }
    ways |= {
        f"explore {n} trials, share {share}, {rule}": partial(
            explore, num=n, share=share, rule=rule
        )
        for n, share, rule in (
            *((n, s, "scaled") for n in (2, 3, 4, 8, 16) for s in (0.05, 0.1)),
            *((n, 0.05, rule) for n in (8, 16) for rule in ("unscaled", "extrapolated")),
        )
    }
    for name, way in ways.items():
        found = [100 * way(np.random.default_rng([7, i])) for i in range(num_sweeps)]
        error = np.std(found) / math.sqrt(num_sweeps)
        print(f"{name:44s} {np.mean(found):6.2f} ± {error:.2f}", flush=True)


if __name__ == "__main__":
    main()
