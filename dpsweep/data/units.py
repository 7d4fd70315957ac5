"""Units: rows that belong together, such as all those of one person, and are protected together.

A unit is what an example is elsewhere: units are sampled, N counts them, and adding or removing one
with all its rows moves the sum by at most C. Its one answer is the mean over its rows, at most k of
them, clipped once. The mean is over the rows it has, so that a unit with few counts as much as
one with many; rows beyond the first k are not used.
"""

import torch
from torch import Tensor

from dpsweep.core.errors import ConfigError
from dpsweep.core.inputs import Inputs, list_tensors, map_inputs, take_rows
from dpsweep.data.tables import FileData

Part = tuple[Inputs, Inputs]
"""Inputs and targets."""


def list_units(units: Tensor, k: int) -> list[list[int]]:
    """List the rows of each unit in the order of the file, at most `k` of each.

    >>> list_units(torch.tensor([7, 3, 7, 7]), 2)
    [[0, 2], [1]]
    """
    found: dict[int, list[int]] = {}
    for row, unit in enumerate(units.tolist()):
        rows = found.setdefault(unit, [])
        if len(rows) < k:
            rows.append(row)
    return list(found.values())


def group_rows(part: Part, units: list[list[int]], k: int) -> Part:
    """Lay the rows of each unit side by side.

    Returns:
        Inputs, shape (U, k, ...), and targets by name: "targets", shape (U, k, ...), and "weights",
        shape (U, k): k / m for each of the m rows of a unit, whose mean over k places is the mean
        over m rows; 0 for places that repeat its first row. Without the k, and targets alone, if
        k is 1.
    """
    if k == 1:
        rows = torch.tensor([unit[0] for unit in units])
        return take_rows(part[0], rows), take_rows(part[1], rows)
    places = torch.tensor([unit + unit[:1] * (k - len(unit)) for unit in units])
    sizes = torch.tensor([len(unit) for unit in units])
    weights = (torch.arange(k) < sizes[:, None]) * (k / sizes[:, None])

    def lay(x: Tensor) -> Tensor:
        return x[places.flatten()].view(*places.shape, *x.shape[1:])

    assert isinstance(part[1], Tensor), "targets of rows are one tensor"
    return map_inputs(lay, part[0]), {"targets": lay(part[1]), "weights": weights.float()}


def fill_unit(part: Part, k: int) -> Part:
    """Make units of `k` rows that are all the same; examples as they are, if k is 1."""
    num = len(list_tensors(part[1])[0])
    places = torch.arange(num).repeat_interleave(k).view(num, k).tolist()
    return group_rows(part, places, k)


def check_units(config: FileData, train: Tensor, test: Tensor | None) -> None:
    """Check the number of units, and that none is in both files.

    Raises:
        ConfigError: If it is another than declared, or rows of one unit are in both: what is
            measured on one would be learned from the other.
    """
    assert config.unit is not None, "checked where there are units"
    num = len(set(train.tolist()))
    if num != config.unit.num_units:
        raise ConfigError(
            f"data.unit.num_units: declares {config.unit.num_units:,}, and column "
            f"{config.unit.column!r} of {config.file} names {num:,} units. Correct one of the two"
        )
    both = set() if test is None else set(train.tolist()) & set(test.tolist())
    if both:
        raise ConfigError(
            f"data.test_file: {config.test_file}: {len(both):,} units of column "
            f"{config.unit.column!r} have rows here and in {config.file}. A unit is all training "
            f"or all test: move its rows, or use validation: holdout, which holds out whole units"
        )
