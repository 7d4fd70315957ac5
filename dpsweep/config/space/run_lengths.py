"""Steps and sampling rates that a space's trials can have: their privacy cost depends on them."""

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import product

from dpsweep.config.keys import BATCH_SIZE, EPOCHS, dotted, path_of
from dpsweep.config.source import Tree
from dpsweep.config.space.domains import Space, keys_overlap, list_touched_keys
from dpsweep.config.space.suggest import RandomDraw
from dpsweep.config.trial import compute_schedule
from dpsweep.core.errors import ConfigError

_KEYS = (BATCH_SIZE, EPOCHS)
_SAMPLES = 64


def schedules_may_vary(space: Space) -> bool:
    """True if the search may choose batch size or epochs."""
    return any(
        keys_overlap(key, changed)
        for path, domain in space.domains.items()
        for changed in list_touched_keys(dotted(path), domain)
        for key in _KEYS
    )


def find_schedule_extremes(
    space: Space, base: Tree, corners: Iterable[Tree], num_examples: int
) -> tuple[tuple[int, float], ...]:
    """T and q for the smallest and largest batch and the fewest and most epochs, all four pairs.

    Args:
        space: What varies.
        base: The tree it varies around.
        corners: Its corners; points inside are looked at as well.
        num_examples: N.
    """
    values: dict[str, set[float]] = {key: set() for key in _KEYS}
    for tree in (*corners, *_inside(space, base)):
        for key in _KEYS:
            value = tree["train"].get(path_of(key)[1])
            if isinstance(value, int | float) and value > 0:  # what is wrong is told elsewhere
                values[key].add(min(value, num_examples) if key == BATCH_SIZE else value)
    sizes, lengths = ({min(found), max(found)} for found in values.values())
    return tuple(sorted({compute_schedule(b, e, num_examples) for b, e in product(sizes, lengths)}))


def _inside(space: Space, base: Tree) -> Iterator[Tree]:
    """Random points; those of which a formula has no value are told when they are proposed."""
    rng = RandomDraw(random.Random(0))
    for _ in range(_SAMPLES):
        with suppress(ConfigError):
            yield space.draw(base, rng)[0]
