"""How long and how dense the trials of a space can be: what their privacy cost depends on."""

import random
from collections.abc import Iterator
from itertools import product

from dpsweep.config.source import Tree
from dpsweep.config.space.domains import Draw, Space, keys_overlap, list_touched_keys
from dpsweep.config.space.points import RandomDraw, walk_corners
from dpsweep.config.trial import compute_schedule
from dpsweep.core.errors import ConfigError

_KEYS = ("batch_size", "epochs")
_SAMPLES = 64


def schedules_may_vary(space: Space) -> bool:
    """True if the search may choose batch size or epochs."""
    return any(
        keys_overlap(f"train.{key}", changed)
        for path, domain in space.domains.items()
        for changed in list_touched_keys(".".join(map(str, path)), domain)
        for key in _KEYS
    )


def find_schedule_extremes(
    space: Space, base: Tree, num_examples: int
) -> tuple[tuple[int, float], ...]:
    """T and q for the smallest and largest batch and the fewest and most epochs, all four pairs.

    Args:
        space: What varies.
        base: The tree it varies around.
        num_examples: N.
    """
    values: dict[str, set[float]] = {key: set() for key in _KEYS}
    for tree in _iter_trees(space, base):
        for key in _KEYS:
            value = tree["train"].get(key)
            if isinstance(value, int | float) and value > 0:  # what is wrong is told elsewhere
                values[key].add(min(value, num_examples) if key == "batch_size" else value)
    sizes, lengths = ({min(found), max(found)} for found in values.values())
    return tuple(sorted({compute_schedule(b, e, num_examples) for b, e in product(sizes, lengths)}))


def _iter_trees(space: Space, base: Tree) -> Iterator[Tree]:
    """The corners one at a time, and points inside."""

    def drawn(draw: Draw) -> Tree | None:
        try:
            return space.draw(base, draw)[0]
        except ConfigError:
            return None  # a formula without a value here; the check of the corners says so

    rng = random.Random(0)
    inside = (drawn(RandomDraw(rng)) for _ in range(_SAMPLES))
    yield from (tree for tree in (*walk_corners(drawn), *inside) if tree is not None)
