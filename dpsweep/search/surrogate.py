"""A Gaussian process over a search's trials: what a config is worth, without the noise of its run.

The best of n noisy trials is partly chosen by its noise (selection bias). Its neighbours tell noise
from worth: the posterior mean of a Gaussian process at a config averages the trials near it. That
is post-processing of results that have been charged, and costs no privacy.

    y_i = f(x_i) + noise,   f ~ GP(0, s^2 Matern_5/2(|x - x'| / l)),   y standardised

x has the total step r = lr C T on a log scale in place of the learning rate (its best value stays
put where clip norm, batch size and length vary, and lr's does not: Panda et al. 2024,
arXiv:2212.04486), and every other searched key, scaled to [0, 1]. There is one process for all
methods of a search: what is chosen from a list (methods among them) is one-hot with one common
length scale, so that methods share what they have in common, and a method with eight trials can
be judged as well. A key that only another method has stands at its middle. Kernel parameters are
the most probable ones under weak priors (maximum likelihood alone takes noise for structure where
trials are few), found from one fixed start: the same trials give the same choice.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsweep.config.keys import BATCH_SIZE, CLIP_NORM, EPOCHS, EPSILON, LEARNING_RATE, TOTAL_STEP
from dpsweep.config.space.derived import Derived
from dpsweep.config.space.domains import Choice, Range, Space
from dpsweep.config.space.leaves import list_leaves
from dpsweep.search.trial_record import Record

Floats = NDArray[np.float64]

_STEP_KEYS = (LEARNING_RATE, TOTAL_STEP, CLIP_NORM, BATCH_SIZE, EPOCHS)
"""Keys on which the total step depends."""

_MOST_TRIALS = 400
"""The best so many are looked at: the cost grows with their third power."""

_FLOOR = 1.5
"""Results further below the median than so many times what the best is above it count as that.
A trial that diverged says where not to go; its depth would only stretch the scale."""

_PRIORS = {"scale": (0.0, 1.0), "length": (0.0, 1.0), "noise": (-1.0, 1.0)}
"""Mean and standard deviation of the logarithm: signal variance, length scale, noise variance."""

_BOUNDS = (-7.0, 4.0)

_SAME = 1e-3
"""Ends of a range nearer than that are one: a number of steps is rounded."""

_CURVE_POINTS = 81
_PAIRS = 200
"""Pairs of searches that are drawn to estimate selection bias."""


@dataclass(frozen=True)
class Feature:
    """One searched thing as the process sees it."""

    key: str  # dotted key, or TOTAL_STEP
    log: bool  # True if places are logarithms
    low: float  # smallest place
    high: float  # largest place
    words: tuple[str, ...] = ()  # the categories; empty for a number

    def scaled(self, values: Sequence[Any]) -> Floats:
        """Columns of these values, shape (number of values, columns); None is the middle."""
        if self.words:
            return np.array([[float(_word(v) == w) for w in self.words] for v in values])
        places = [math.nan if v is None else math.log(v) if self.log else float(v) for v in values]
        columns = (np.array(places)[:, None] - self.low) / (self.high - self.low)
        return np.where(np.isnan(columns), 0.5, columns)


@dataclass(frozen=True)
class SelectionBias:
    """Selection bias of a search such as this one, in units of the objective."""

    overstatement: float  # how far the best result lies above what its config is worth, on average
    spread: float  # standard deviation of what the chosen config is worth, over such searches


class Surrogate:
    """A Gaussian process fitted to complete trials.

    Args:
        records: Complete trials, two or more.
        sign: -1 if large objectives are good, 1 if small ones are.
    """

    def __init__(self, space: Space, records: Sequence[Record], sign: int) -> None:
        best_first = sorted(records, key=lambda r: (sign * (r.value or 0.0), r.number))
        self.records = sorted(best_first[:_MOST_TRIALS], key=lambda r: r.number)
        self._sign = sign
        self._features = searched_features(space, self.records)
        self._center = _centers(self.records)
        goods = np.array([-sign * (r.value or 0.0) for r in self.records])
        middle = float(np.median(goods))
        goods = np.maximum(goods, middle - _FLOOR * (goods.max() - middle))
        self._mean, self._unit = float(goods.mean()), float(goods.std()) or 1.0
        self._targets = (goods - self._mean) / self._unit
        tied = [i for i, f in enumerate(self._features) for _ in f.words or (0,)]
        self._process = _fit_process(self._columns(self.records), self._targets, tied)
        parameters = self._process.kernel_.theta
        lengths = dict(zip(tied, parameters[1:-1], strict=True))
        # of one run around what its config is worth, in units of the objective
        self.noise = self._unit * math.exp(parameters[-1] / 2)
        self.features = [  # the most decisive first
            f for i, f in sorted(enumerate(self._features), key=lambda x: lengths[x[0]])
        ]

    def means(self) -> dict[int, float]:
        """Posterior mean of the objective at every trial's config, by its number."""
        found = self._process.predict(self._columns(self.records))
        return {
            r.number: -self._sign * (self._mean + self._unit * float(m))
            for r, m in zip(self.records, found, strict=True)
        }

    def along(self, feature: Feature, record: Record) -> tuple[Floats, ...]:
        """The posterior as one feature varies over its range, the others being as in one trial.

        Returns:
            Values of the feature, posterior mean of the objective, and the posterior's standard
            deviation (of what a config is worth: the noise of a run is not in it).
        """
        places = np.linspace(feature.low, feature.high, _CURVE_POINTS)
        columns = np.repeat(self._columns([record]), _CURVE_POINTS, axis=0)
        before = self._features[: self._features.index(feature)]
        columns[:, sum(len(f.words or (0,)) for f in before)] = np.linspace(0, 1, _CURVE_POINTS)
        mean, spread = self._process.predict(columns, return_std=True)
        noise = math.exp(self._process.kernel_.theta[-1])
        spread = self._unit * np.sqrt(np.maximum(spread**2 - noise, 0.0))
        values = np.exp(places) if feature.log else places
        if feature.key == TOTAL_STEP:
            values = values * self._center[record.config.optimizer.name]
        return values, -self._sign * (self._mean + self._unit * mean), spread

    def estimate_selection_bias(self, *, by_posterior: bool) -> SelectionBias:
        """Estimate the selection bias of such a search, from pairs drawn from the posterior.

        Both of a pair search the same f, drawn from the posterior. Each has as many trials as this
        search, at configs drawn from its own with replacement (where a search looks is chance too),
        and fresh noise; it chooses as this one does, under the same kernel.

        Args:
            by_posterior: Whether the config is chosen by posterior mean, or as observed.
        """
        columns, rng = self._columns(self.records), np.random.default_rng(0)
        kernel, noise = self._process.kernel_.k1(columns), math.exp(self._process.kernel_.theta[-1])
        count = len(columns)
        gain = np.linalg.solve(kernel + noise * np.eye(count), kernel).T
        covariance = kernel - gain @ kernel + 1e-8 * np.eye(count)
        root = np.linalg.cholesky((covariance + covariance.T) / 2)

        def search(truth: Floats) -> tuple[float, float]:
            drawn = rng.integers(count, size=count)
            results = truth[drawn] + math.sqrt(noise) * rng.standard_normal(count)
            best = int(results.argmax())
            over = results[best] - truth[drawn[best]]
            if by_posterior:
                near = kernel[np.ix_(drawn, drawn)]
                best = int((near @ np.linalg.solve(near + noise * np.eye(count), results)).argmax())
            return truth[drawn[best]], over

        pairs = []
        for _ in range(_PAIRS):
            truth = gain @ self._targets + root @ rng.standard_normal(count)
            pairs.append((search(truth), search(truth)))
        found = self._unit * np.array(pairs)
        apart = found[:, 0, 0] - found[:, 1, 0]
        return SelectionBias(float(found[:, :, 1].mean()), float(np.sqrt(np.mean(apart**2) / 2)))

    def _columns(self, records: Sequence[Record]) -> Floats:
        values = [[self._relative(f.key, r) for r in records] for f in self._features]
        return np.hstack([f.scaled(v) for f, v in zip(self._features, values, strict=True)])

    def value_of(self, key: str, record: Record) -> Any:
        """A trial's value of a feature; None where its method has no such key."""
        return record.config.total_step if key == TOTAL_STEP else record.hyperparams.get(key)

    def _relative(self, key: str, record: Record) -> Any:
        value = self.value_of(key, record)
        return value / self._center[record.config.optimizer.name] if key == TOTAL_STEP else value


def searched_features(space: Space, records: Sequence[Record]) -> list[Feature]:
    """List the keys that varied among the trials."""
    known = list_leaves(space)
    derived = {leaf.slot.key for leaf in known if isinstance(leaf.domain, Derived)}
    log = {
        leaf.slot.key
        for leaf in known
        if (isinstance(leaf.domain, Range) and leaf.domain.is_log)
        or isinstance(leaf.domain, Choice)
    }
    keys = list(dict.fromkeys(key for r in records for key in r.hyperparams))
    found = list[Feature]()
    if any(key in _STEP_KEYS for key in keys):
        center = _centers(records)
        steps = [r.config.total_step / center[r.config.optimizer.name] for r in records]
        found += _feature(TOTAL_STEP, steps, log=True)
    for key in keys:
        if key not in derived and key not in (EPSILON, LEARNING_RATE, TOTAL_STEP):
            values = [v for r in records if (v := r.hyperparams.get(key)) is not None]
            found += _feature(key, values, log=key in log)
    return found


def _feature(key: str, values: Sequence[Any], *, log: bool) -> list[Feature]:
    """One, or none if the values are all the same."""
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        low, high = min(values), max(values)
        log = log and low > 0
        ends = (math.log(low), math.log(high)) if log else (float(low), float(high))
        return [Feature(key, log, *ends)] if ends[1] > ends[0] + _SAME * abs(ends[1]) else []
    words = tuple(dict.fromkeys(map(_word, values)))
    return [Feature(key, False, 0.0, 1.0, words)] if len(words) > 1 else []


def _word(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _centers(records: Sequence[Record]) -> dict[str, float]:
    """Geometric mean of the total steps with each base optimizer: Adam's mean something else."""
    found: dict[str, list[float]] = {}
    for r in records:
        found.setdefault(r.config.optimizer.name, []).append(math.log(r.config.total_step))
    return {name: math.exp(sum(logs) / len(logs)) for name, logs in found.items()}


def _fit_process(columns: Floats, targets: Floats, tied: Sequence[int]) -> Any:
    """Fit scikit-learn's process with its most probable kernel.

    Columns of one feature share a length scale; `tied` has the feature of each column.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor  # a second and more to load
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    place = np.array([0, *(1 + i for i in tied), 2 + max(tied, default=-1)])
    priors = [_PRIORS["scale"], *[_PRIORS["length"]] * (len(set(place)) - 2), _PRIORS["noise"]]
    means, widths = np.array(priors).T

    def maximise(cost: Callable[..., Any], start: Floats, bounds: Floats) -> tuple[Floats, float]:
        from scipy.optimize import minimize

        def penalise(free: Floats) -> tuple[float, Floats]:
            value, gradient = cost(free[place], eval_gradient=True)
            off = (free - means) / widths
            return (
                value + 0.5 * float(off @ off),
                np.bincount(place, weights=gradient) + off / widths,
            )

        done = minimize(penalise, means, jac=True, method="L-BFGS-B", bounds=[_BOUNDS] * len(means))
        return done.x[place], float(done.fun)

    limits = (1e-9, 1e9)  # ours are narrower, and scikit-learn warns of what is near its own
    lengths = [1.0] * columns.shape[1]
    kernel = ConstantKernel(1.0, limits) * Matern(lengths, limits, nu=2.5) + WhiteKernel(
        0.2, limits
    )
    return GaussianProcessRegressor(kernel, alpha=1e-10, optimizer=maximise).fit(columns, targets)
