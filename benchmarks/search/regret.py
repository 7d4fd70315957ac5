"""Regret of a search: the real proposer and chooser on tables of training runs.

    python benchmarks/search/regret.py [TABLE ...] [--sweeps N] [--trials T] [--way W] [--batch B]

Regret is the best accuracy that the table holds less the true one of the config that is chosen, in
points. The true accuracy of a config is interpolated between the table's, smoothed by a Gaussian
process; a trial's is that plus the deviation of a run of the nearest config from its mean. Each
sweep has a seed of its own. Ways to search:

    default   none: the first trial of a default space
    narrow    search: {method: default}, space: narrow: the total step alone
    full      search: {method: default}: total step, clip norm, and the method's own keys
    observed  the same, and the best result is chosen (choose: observed)
    plain     our sampler on learning rate, clip norm and batch size, as users write them
    random    Optuna's RandomSampler on the same
    tpe, gp   Optuna's TPESampler and GPSampler on the same, as users call them

narrow, full and plain choose by `choose: posterior` as sweeps do (with few trials, the first two by
the default), the others the best trial. Batch sizes are searched by plain, random, tpe and gp; the
others have B, or the one of the table's base config or, without one, its smallest.
"""

import argparse
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import TrialState
from tables import STEP, Table, Tree, read_table

from dpsweep.config.keys import EPSILON
from dpsweep.config.plan import plan_privacy
from dpsweep.config.source import Source, with_value
from dpsweep.config.space.conditions import get_scalar
from dpsweep.config.space.domains import Choice, Range
from dpsweep.config.sweep import ResolvedSweep, parse_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.search.propose import Proposal, propose
from dpsweep.search.ranking import make_choice, rank_trials
from dpsweep.search.trial_record import Record, make_attributes, make_record

COUNTS = (4, 8, 16, 32)
_LINEAR_AXES = ("method.kappa", "method.depth", "method.outer_decay", "method.points")
_LR, _CLIP = (0.1, 10.0), (0.1, 10.0)
"""The ranges of the plain space: those of dpsweep's default spaces until now, and of tutorials."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """A table as a search sees it.

    Attributes:
        table: Its runs.
        batch_size: Of runs whose batch size is not searched; None for the table's own.
    """

    table: Table
    batch_size: int | None = None

    @cached_property
    def _places(self) -> list[Values]:
        axes = self.table.spec.axes
        return [self._scaled(key, np.array(values, float)) for key, values in axes.items()]

    @staticmethod
    def _scaled(key: str, values: Values) -> Values:
        return values if key in _LINEAR_AXES else np.log2(values)

    @cached_property
    def _smooth(self) -> Callable[[Values], Values]:
        """Log of the error rate at places, interpolated between the smoothed means of the table."""
        from scipy.interpolate import RegularGridInterpolator
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        wrong = np.log(101 - np.nanmean(self.table.accuracy, -1))
        nodes = np.stack(np.meshgrid(*self._places, indexing="ij"), -1).reshape(-1, wrong.ndim)
        low, span = nodes.min(0), np.ptp(nodes, 0)
        kernel = ConstantKernel(1.0) * Matern(np.ones(wrong.ndim), (0.05, 20), 2.5) + WhiteKernel(
            0.01
        )
        process = GaussianProcessRegressor(kernel, normalize_y=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a length at its bound: a key that does nothing
            process.fit((nodes - low) / span, wrong.ravel())
        smooth = process.predict((nodes - low) / span).reshape(wrong.shape)
        found: Callable[[Values], Values] = RegularGridInterpolator(self._places, smooth)
        return found

    def _place(self, config: TrialConfig) -> Values:
        """The config's place in the table; what lies outside is at its edge."""
        found = []
        for key, nodes in zip(self.table.spec.axes, self._places, strict=True):
            # an exploring trial has noise in place of an epsilon
            value = plan_privacy(config).epsilon if key == EPSILON else get_scalar(config, key)
            place = float(self._scaled(key, np.array(float(value))))  # type: ignore[arg-type]
            found.append(min(max(place, nodes[0]), nodes[-1]))
        return np.array(found)

    def truth(self, config: TrialConfig) -> float:
        """Look up the value of a config, in percent."""
        return 101 - math.exp(float(self._smooth(self._place(config))[0]))

    @cached_property
    def best(self) -> float:
        """The largest of it, at the epsilon of the table's base config."""
        places = dict(zip(self.table.spec.axes, self._places, strict=True))
        if EPSILON in places:
            places[EPSILON] = np.log2([self.table.spec.base["privacy"]["epsilon"]])
        nodes = np.stack(np.meshgrid(*places.values(), indexing="ij"), -1)
        return 101 - math.exp(float(self._smooth(nodes).min()))

    def observe(self, config: TrialConfig, rng: np.random.Generator) -> float:
        """Draw the result of one run of it, as a share."""
        cell = tuple(
            int(np.abs(nodes - x).argmin())
            for nodes, x in zip(self._places, self._place(config), strict=True)
        )
        runs = self.table.accuracy[cell]
        runs = runs[~np.isnan(runs)]
        noise = 0.0
        if len(runs) > 1:
            noise = (rng.choice(runs) - runs.mean()) * math.sqrt(len(runs) / (len(runs) - 1))
        return min(100.0, self.truth(config) + noise) / 100


def make_sweep(world: World, search: Tree, seed: int, trials: int, **more: Any) -> ResolvedSweep:
    """A sweep over the table's base config."""
    base = world.table.spec.base
    if world.batch_size:
        base = with_value(base, ("train", "batch_size"), world.batch_size)
    for key, values in world.table.spec.axes.items():
        if key != STEP and len(values) > 1 and key not in search:  # a table's own middle
            base = with_value(base, tuple(key.split(".")), base_value(base, key, values))
    if base["data"]["name"] == "npz":
        base = with_value(base, ("data", "root"), "mnist14.npz")
    tree = {"name": "regret", "base": base, "search": search, "seed": seed}
    return parse_sweep(
        Source("regret.yaml", {**tree, "budget": {"trials": trials}, **more}, {}), Path()
    )


def base_value(base: Tree, key: str, values: Sequence[float]) -> float:
    """The value of a table that is next to the base's own; the smallest, where it has none."""
    section, name = key.split(".")
    own = base[section].get(name, values[0])
    return min(values, key=lambda value: abs(value - own))


def plain_space(world: World) -> Tree:
    """Learning rate, clip norm and batch size, and the method's own keys, as users write them."""
    space: Tree = {
        "optimizer.lr": {"log_uniform": list(_LR)},
        "privacy.clip_norm": {"log_uniform": list(_CLIP)},
    }
    for key, values in world.table.spec.axes.items():
        if key == "train.batch_size" or key == "method.points":
            space[key] = {"choice": values}
        elif key.startswith("method."):
            space[key] = {"uniform": [values[0], values[-1]]}
    return space


def search_ours(world: World, sweep: ResolvedSweep, trials: int, seed: int) -> list[float]:
    """True accuracy of the chosen config after each of COUNTS trials, by dpsweep's own parts."""
    rng = np.random.default_rng(seed)
    return [
        world.truth(rank_chosen(sweep, records)[0].config)
        for records in run_trials(sweep, trials, lambda config, _: world.observe(config, rng))
        if len(records) in COUNTS
    ]


def run_trials(
    sweep: ResolvedSweep, trials: int, measure: Callable[[TrialConfig, int], float]
) -> Iterator[list[Record]]:
    """Propose trials one after another, and yield all that were run after each.

    Args:
        measure: Gives the accuracy of a config's run, as a share; called with its number too.
    """
    study, records = optuna.create_study(direction="maximize"), list[Record]()
    for number in range(trials):
        proposal = propose(sweep, study)
        records.append(add_trial(study, proposal, measure(proposal.config, number)))
        yield records


def rank_chosen(sweep: ResolvedSweep, records: Sequence[Record]) -> list[Record]:
    """The trials as the sweep ranks them when its search has ended, the best first."""
    return rank_trials(make_choice(sweep, records).apply(records), sign=-1)


def add_trial(study: optuna.Study, proposal: Proposal, value: float) -> Record:
    """Add a proposed trial and its result to a study, as a sweep's own study has them."""
    trial = optuna.trial.create_trial(
        state=TrialState.COMPLETE,
        params=dict(proposal.params),
        distributions=dict(proposal.ways),
        user_attrs=make_attributes(proposal.config, proposal.hyperparams),
        system_attrs=dict(proposal.notes),
        value=value,
        intermediate_values={proposal.config.steps_and_rate[0]: value},
    )
    study.add_trial(trial)
    return make_record(study.trials[-1], proposal.config)


def search_optuna(
    world: World, sweep: ResolvedSweep, trials: int, seed: int, sampler: optuna.samplers.BaseSampler
) -> list[float]:
    """Run Optuna's sampler in a plain loop, and choose the best trial."""
    rng, found, best = np.random.default_rng(seed), [], (-1.0, 0.0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for number in range(trials):
        trial = study.ask()
        tree = sweep.base.tree
        for path, domain in sweep.space.domains.items():
            name = ".".join(map(str, path))
            if isinstance(domain, Choice):
                value = trial.suggest_categorical(name, list(domain.options))
            else:
                assert isinstance(domain, Range), "a plain space derives nothing"
                value = trial.suggest_float(name, domain.low, domain.high, log=domain.is_log)
            tree = with_value(tree, path, value)
        config = sweep.trial(tree)
        value = world.observe(config, rng)
        study.tell(trial, value)
        best = max(best, (value, world.truth(config)))
        if number + 1 in COUNTS:
            found.append(best[1])
    return found


WAYS = ("default", "narrow", "full", "observed", "plain", "random", "tpe", "gp")


def regrets(world: World, way: str, sweeps: int, trials: int) -> NDArray[np.float64]:
    """Regret in points, shape (sweeps, counts up to `trials`)."""
    default, found = {"method": "default"}, []
    if way == "default":
        sweep = make_sweep(world, default, 0, 1)
        first = propose(sweep, optuna.create_study(direction="maximize"))
        lost = world.best - world.truth(first.config)
        return np.full((1, sum(n <= trials for n in COUNTS)), lost)
    for seed in range(sweeps):
        if way in ("narrow", "full", "observed"):
            space = "narrow" if way == "narrow" else "full"
            choice = "observed" if way == "observed" else "posterior"
            sweep = make_sweep(world, default, seed, trials, space=space, choose=choice)
            found.append(search_ours(world, sweep, trials, seed))
            continue
        sweep = make_sweep(world, plain_space(world), seed, trials)
        if way == "plain":
            found.append(search_ours(world, sweep, trials, seed))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = {
                "random": optuna.samplers.RandomSampler,
                "tpe": optuna.samplers.TPESampler,
                "gp": optuna.samplers.GPSampler,
            }[way](seed=seed)
        found.append(search_optuna(world, sweep, trials, seed, sampler))
    return world.best - np.array(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", default=["digits_linear", "digits_cnn", "mnist14"])
    parser.add_argument("--sweeps", type=int, default=100, help="searches of each kind")
    parser.add_argument("--trials", type=int, default=32, help="the longest")
    parser.add_argument("--way", action="append", choices=WAYS, help="ways to search; all")
    parser.add_argument("--batch", type=int, help="batch size of what does not search it")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    counts = [n for n in COUNTS if n <= given.trials]
    print(
        "| table | way |"
        + "".join(f" {n} trials |" for n in counts)
        + "\n|---|---|"
        + "---|" * len(counts)
    )
    for name in given.tables:
        world = World(read_table(name), given.batch)
        for way in given.way or WAYS:
            found = regrets(world, way, given.sweeps, given.trials)
            cells = [
                f" {mean:.2f} ({worst:.2f}) |"
                for mean, worst in zip(found.mean(0), np.percentile(found, 90, 0), strict=True)
            ]
            print(f"| {name}, best {world.best:.1f} | {way} |" + "".join(cells), flush=True)
