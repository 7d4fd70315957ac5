"""Rows of parameters for a test, such that every two values of two parameters meet in some row.

A fault that depends on one parameter, or on two together, fails in some row of `pairs`; of three
that must meet, use the product. Five parameters of five values are 25 to 40 rows instead of 3125.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[str, ...]


def cover_pairs(axes: Mapping[str, Iterable[Any]], allowed: Callable[..., bool]) -> list[Row]:
    """Choose rows that hold every allowed pair of values, the most new pairs first.

    The choice is greedy over the product, in its order, and so the same on every machine.

    Args:
        axes: The labels of each parameter's values.
        allowed: Whether a combination, given by the parameters' names, may occur.
    """
    names = list(axes)
    rows = [row for row in product(*axes.values()) if allowed(**dict(zip(names, row, strict=True)))]
    met = {row: set(combinations(enumerate(row), min(2, len(names)))) for row in rows}
    missing, chosen = set().union(*met.values()), []
    while missing:
        best = max(rows, key=lambda row: len(met[row] & missing))
        missing -= met[best]
        chosen.append(best)
    return chosen


def pairs(
    allowed: Callable[..., bool] = lambda **_: True, **axes: Mapping[str, Any] | Iterable[Any]
) -> pytest.MarkDecorator:
    """Parametrize a test by rows in which every two values of two parameters meet.

    Args:
        allowed: Whether a combination of values' labels may occur.
        axes: For each parameter its values, or a mapping from labels to values.
    """
    labelled = {
        name: dict(values) if isinstance(values, Mapping) else {str(x): x for x in values}
        for name, values in axes.items()
    }
    rows = cover_pairs(labelled, allowed)
    return pytest.mark.parametrize(
        tuple(labelled),
        [
            tuple(labelled[name][label] for name, label in zip(labelled, row, strict=True))
            for row in rows
        ],
        ids=["-".join(row) for row in rows],
    )
