"""Accuracy at one total epsilon, by how a search spends it: dpsweep's own parts on a table.

    python benchmarks/search/allocation.py [--epsilon E] [--sweeps N] [--wide]

The real allocator gives each run its noise, the real proposer and chooser search the default space
(with --wide, total steps of 40 to 10,240 without a known first trial), and the table
`digits_epsilon` (a linear model, its epsilon and total step) has what a run comes to. Printed is
what the config that is handed out is worth at its own epsilon, in percent: mean with its standard
error, and 10th percentile, over whole searches. Ways to spend epsilon:

    default     no search: one run of the default has all of it
    equal       k trials with equal shares; one of them is handed out
    selection   private selection; the number of trials has mean k
    explore     k noisy trials with a share, and one final run with the rest
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import optuna
from regret import World, rank_chosen, run_trials
from tables import STEP, Tree, read_table

from dpsweep.config.source import Source
from dpsweep.config.sweep import ResolvedSweep, parse_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.search.propose import propose

COUNTS, SHARES = (2, 4, 8, 16), (0.05, 0.1)
NEAR: Tree = {"method": "default"}
WIDE: Tree = {STEP: {"log_uniform": [40.0, 10240.0]}}


@dataclass(frozen=True)
class Problem:
    """What is searched, and what its runs come to."""

    world: World
    search: Tree
    epsilon: float  # of the whole search


def make_sweep(problem: Problem, seed: int, **more: Tree | str) -> ResolvedSweep:
    """A sweep with one epsilon for all of it."""
    privacy = {"epsilon": problem.epsilon, "scope": "sweep"}
    base = {**problem.world.table.spec.base, "privacy": privacy}
    tree = {"name": "allocation", "base": base, "search": problem.search, "seed": seed}
    return parse_sweep(Source("allocation.yaml", {**tree, **more}, {}), Path())


def choose(problem: Problem, sweep: ResolvedSweep, trials: int, seed: int) -> TrialConfig:
    """The config that the sweep chooses after so many trials."""
    rng = np.random.default_rng(seed)
    *_, records = run_trials(sweep, trials, lambda config, _: problem.world.observe(config, rng))
    return rank_chosen(sweep, records)[0].config


def spend_on_default(problem: Problem, seed: int) -> TrialConfig:
    """The default, with all of epsilon."""
    sweep = make_sweep(problem, seed, budget={"trials": 1})
    return propose(sweep, optuna.create_study(direction="maximize")).config


def spend_equally(problem: Problem, seed: int, trials: int) -> TrialConfig:
    """The config that trials with equal shares choose, as one of them."""
    return choose(problem, make_sweep(problem, seed, budget={"trials": trials}), trials, seed)


def spend_by_selection(problem: Problem, seed: int, mean: int) -> TrialConfig:
    """The config that a private selection of random trials releases."""
    settings = {"accounting": "private_selection", "choose": "observed"}
    random: Tree = {"budget": {"trials": mean}, "sampler": {"name": "random"}}
    sweep = make_sweep(problem, seed, **settings, **random)
    return choose(problem, sweep, int(np.random.default_rng(seed).geometric(1 / mean)), seed)


def spend_on_exploring(problem: Problem, seed: int, trials: int, share: float) -> TrialConfig:
    """The final run's config."""
    explore = {"explore": {"trials": trials, "share": share}}
    sweep = make_sweep(problem, seed, budget=explore)
    return sweep.final(choose(problem, sweep, trials, seed))


WAYS: dict[str, Callable[[Problem, int], TrialConfig]] = {
    "default": spend_on_default,
    **{f"equal, {k} trials": partial(spend_equally, trials=k) for k in COUNTS},
    **{f"selection, mean {k}": partial(spend_by_selection, mean=k) for k in COUNTS},
    **{
        f"explore {k} trials, share {share:g}": partial(spend_on_exploring, trials=k, share=share)
        for share in SHARES
        for k in COUNTS
    },
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epsilon", type=float, default=4.0, help="of a whole search")
    parser.add_argument("--sweeps", type=int, default=200, help="searches of each way")
    parser.add_argument("--wide", action="store_true", help="search without a known default")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    world = World(read_table("digits_epsilon"))
    problem = Problem(world, WIDE if given.wide else NEAR, given.epsilon)
    print("| way | accuracy | 10th percentile |\n|---|---|---|")
    for name, way in WAYS.items():
        worth = [world.truth(way(problem, seed)) for seed in range(given.sweeps)]
        error = np.std(worth) / math.sqrt(len(worth))
        low = np.percentile(worth, 10)
        print(f"| {name} | {np.mean(worth):.2f} ± {error:.2f} | {low:.1f} |", flush=True)


if __name__ == "__main__":
    main()
