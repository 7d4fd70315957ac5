"""Methods after equal searches, averaged over whole searches, so that none alone decides.

    python benchmarks/search/leaderboard.py [--epsilon E] [--searches N]

A linear model on the digits, batch 256, 30 epochs, cosine schedule; the trial's own steps, and the
sweep's own proposer and chooser, in one process. Two ways, each with a seed of its own a search:

    each       eight trials a method over its default space, each with the whole epsilon; the config
               chosen for a method is run five times more, and these runs count
    together   one epsilon for the search of one method: eight exploring trials with a share of
               0.05, and the final run, which counts
    default    no search: five runs of the method's default
    long       a search of 32 trials of one method; the config chosen is run five times more

Printed are each method's accuracy in percent, its mean over the searches, and its difference to
DP-SGD in the same searches with a 95 % interval.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from regret import rank_chosen, run_trials
from scipy.stats import t as student
from tables import COSINE, LINEAR, Tree, train_once

from dpsweep.config.source import Source
from dpsweep.config.sweep import ResolvedSweep, parse_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.search.trial_record import Record

METHODS = ("dp_sgd", "dp_adam", "dp_adambc", "doppler", "disk", "fftkf", "innerouter", "dp_pmlf")
TRIALS, LONG, FRESH, SHARE = 8, 32, 5, 0.05


def make_sweep(epsilon: float, search: Tree, seed: int, **more: Any) -> ResolvedSweep:
    """A sweep on the digits; of one epsilon for all of it where it explores."""
    scope = {"scope": "sweep"} if "explore" in more["budget"] else {}
    base = {
        "data": {"name": "digits"},
        "model": LINEAR,
        "privacy": {"epsilon": epsilon, **scope},
        "train": {"batch_size": 256, "epochs": 30, "threads": 1, "device": "cpu"},
        "optimizer": COSINE,
        "method": {"name": more.pop("method", "dp_sgd")},
    }
    tree = {"name": "leaderboard", "base": base, "search": search, "seed": seed, **more}
    return parse_sweep(Source("leaderboard.yaml", tree, {}), Path())


def run(config: TrialConfig, text: str) -> float:
    """Test accuracy of one run with the secret of `text`, as a share."""
    right, num = train_once(config, text)
    return right / num


def choose(sweep: ResolvedSweep, records: list[Record]) -> dict[str, TrialConfig]:
    """The config that the sweep chooses for each method."""
    ranked = rank_chosen(sweep, records)
    return {record.config.method.name: record.config for record in reversed(ranked)}


def search(sweep: ResolvedSweep, trials: int, text: str) -> dict[str, TrialConfig]:
    """Train the trials of a search, and choose the config of each method."""
    *_, records = run_trials(sweep, trials, lambda config, number: run(config, f"{text}/{number}"))
    return choose(sweep, records)


def search_each(epsilon: float, seed: int) -> dict[str, float]:
    """Mean accuracy of fresh runs of each method's chosen config, after one search of all."""
    trials = TRIALS * len(METHODS)
    sweep = make_sweep(epsilon, {"each_of": list(METHODS)}, seed, budget={"trials": trials})
    chosen = search(sweep, trials, f"{epsilon}/{seed}")
    return {name: run_afresh(config, f"{epsilon}/{seed}") for name, config in chosen.items()}


def search_one(epsilon: float, seed: int, trials: int = LONG) -> dict[str, float]:
    """The same of each method after a search of its own."""
    found = {}
    for name in METHODS:
        budget = {"trials": trials}
        sweep = make_sweep(epsilon, {"method": "default"}, seed, budget=budget, method=name)
        chosen = search(sweep, trials, f"{trials}/{name}/{epsilon}/{seed}")
        found[name] = run_afresh(chosen[name], f"{trials}/{epsilon}/{seed}")
    return found


def run_afresh(config: TrialConfig, text: str) -> float:
    """Mean accuracy of fresh runs of a config."""
    name = config.method.name
    return float(np.mean([run(config, f"{name}/{text}/{i}") for i in range(FRESH)]))


def search_together(epsilon: float, seed: int) -> dict[str, float]:
    """Accuracy of the final run of each method's own search inside one epsilon."""
    found = {}
    for name in METHODS:
        budget = {"explore": {"trials": TRIALS, "share": SHARE}}
        sweep = make_sweep(epsilon, {"method": "default"}, seed, budget=budget, method=name)
        chosen = search(sweep, TRIALS, f"explore/{name}/{epsilon}/{seed}")
        found[name] = run(sweep.final(chosen[name]), f"{name}/{epsilon}/{seed}")
    return found


def lines(way: str, epsilon: float, found: list[dict[str, float]]) -> Iterator[str]:
    """Rows of a table, the best method first."""
    values = {name: 100 * np.array([one[name] for one in found]) for name in METHODS}
    for name in sorted(METHODS, key=lambda name: -values[name].mean()):
        lead = values[name] - values["dp_sgd"]
        error = student.ppf(0.975, len(found) - 1) * lead.std(ddof=1) / math.sqrt(len(found))
        difference = "–" if name == "dp_sgd" else f"{lead.mean():+.2f} ± {error:.2f}"
        yield f"| {way} | {epsilon:g} | {name} | {values[name].mean():.2f} | {difference} |"


WAYS: dict[str, Callable[[float, int], dict[str, float]]] = {
    "each": search_each,
    "together": search_together,
    "default": partial(search_one, trials=1),
    "long": search_one,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epsilon", type=float, action="append", help="default 1 and 4")
    parser.add_argument("--searches", type=int, default=5, help="whole searches, two or more")
    parser.add_argument("--way", choices=tuple(WAYS), action="append", help="each, together")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print("| way | epsilon | method | accuracy | to dp_sgd |\n|---|---|---|---|---|")
    for way in options.way or ("each", "together"):
        search_all = WAYS[way]
        for epsilon in options.epsilon or (1.0, 4.0):
            found = [search_all(epsilon, seed) for seed in range(options.searches)]
            print("\n".join(lines(way, epsilon, found)), flush=True)


if __name__ == "__main__":
    main()
