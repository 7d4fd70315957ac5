"""Confidence intervals, tests and corrections for a few runs of two configs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal

CONFIDENCE = 0.95
"""Of every interval."""

LEVEL = 0.05
"""A corrected p-value below it counts as a difference."""


def half_width(values: Sequence[float]) -> float | None:
    """Half the 95 % confidence interval of a mean, by Student's t; None for a single value.

    >>> round(half_width([0.9, 0.92, 0.94]), 4)
    0.0497
    """
    if len(values) < 2:
        return None
    return _t(len(values) - 1) * stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Gap:
    """Difference between two configs' repeats, with its interval and p-value."""

    # paired (t-test of the differences, repeats with one seed in pairs) or Welch's (unequal
    # variances, no pairs); none if there are too few repeats for either
    kind: Literal["paired", "Welch", "none"]
    # mean of the first less mean of the second; over the pairs, if there are some
    difference: float
    half: float | None  # half its 95 % confidence interval, not corrected for the number of tests
    # chance of a difference this large if there is none; None where it cannot be said
    p: float | None
    num_runs: tuple[int, int]  # repeats of each that the test is about


def gap_between(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> Gap:
    """Compare repeats, each with its public seed; there is at least one on either side.

    Repeats are in pairs if no seed stands twice on a side and two or more stand on both; what
    has no partner is then left out.
    """
    first, second = dict(one), dict(other)
    shared = sorted(first.keys() & second.keys())
    if len(first) == len(one) and len(second) == len(other) and len(shared) >= 2:
        return _pair_seeds(first, second, shared)
    return _welch([value for _, value in one], [value for _, value in other])


def _pair_seeds(one: Mapping[int, float], other: Mapping[int, float], seeds: list[int]) -> Gap:
    gaps, runs = [one[seed] - other[seed] for seed in seeds], (len(seeds), len(seeds))
    half = half_width(gaps)
    if stdev(gaps) <= 1e-9 * max(map(abs, gaps)):  # equal differences: their spread is not known
        return Gap("paired", mean(gaps), half, None if any(gaps) else 1.0, runs)
    from scipy import stats

    p = float(stats.ttest_1samp(gaps, 0.0).pvalue)
    return Gap("paired", mean(gaps), half, p, runs)


def _welch(one: list[float], other: list[float]) -> Gap:
    difference, runs = mean(one) - mean(other), (len(one), len(other))
    if min(runs) < 2:
        return Gap("none", difference, None, None, runs)
    if stdev(one) + stdev(other) == 0:
        return Gap("Welch", difference, 0.0, None if difference else 1.0, runs)
    from scipy import stats

    found = stats.ttest_ind(one, other, equal_var=False)
    bounds = found.confidence_interval(CONFIDENCE)
    return Gap("Welch", difference, float(bounds.high - bounds.low) / 2, float(found.pvalue), runs)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number, in their order (Holm 1979); None where there is none.

    >>> [None if p is None else round(p, 3) for p in holm([0.01, None, 0.04, 0.03])]
    [0.03, None, 0.06, 0.06]
    """
    tested = sorted((p, i) for i, p in enumerate(values) if p is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, i) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        corrected[i] = largest
    return corrected


def _t(freedom: int) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
