"""Steps and sampling rates that a space's trials can have: their privacy cost depends on them."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from dpsweep.config.keys import BATCH_SIZE, EPOCHS, format_path, path_of
from dpsweep.config.source import Tree
from dpsweep.config.space.domains import Space, keys_overlap, list_touched_keys
from dpsweep.config.space.suggest import RandomDraw
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.methods import may_correlate
from dpsweep.privacy.correlated import INDEPENDENT, Banded, Noise, PublicSettings

_KEYS = (BATCH_SIZE, EPOCHS)
_SAMPLES = 64

_FEW = 6
"""Numbers of bands that are all looked at; of more, the ends and the powers of two."""


def schedules_may_vary(space: Space) -> bool:
    """True if the search may choose batch size, epochs or bands."""
    return any(
        keys_overlap(key, changed) or (changed.startswith("method.") and changed.endswith(".bands"))
        for path, domain in space.domains.items()
        for changed in list_touched_keys(format_path(path), domain)
        for key in _KEYS
    )


def find_schedule_extremes(
    space: Space,
    base: Tree,
    corners: Iterable[Tree],
    num_examples: int,
    load: Callable[[Tree], TrialConfig],
) -> tuple[tuple[int, float], ...]:
    """Schedules for the smallest and largest batch and the fewest and most epochs, all four pairs.

    And that for each noise that a trial may have. Where bands are searched, the numbers between the
    least and the most are represented by the powers of two among them.

    Args:
        corners: Its corners; points inside are looked at as well.
    """
    values: dict[str, set[float]] = {key: set() for key in _KEYS}
    kinds: dict[tuple[Noise, PublicSettings], None] = {}
    for tree in (*corners, *_inside(space, base)):
        for key in _KEYS:
            value = tree["train"].get(path_of(key)[1])
            if isinstance(value, int | float) and value > 0:  # what is wrong is told elsewhere
                values[key].add(min(value, num_examples) if key == BATCH_SIZE else value)
        if not may_correlate(tree.get("method")):
            kinds[INDEPENDENT, PublicSettings(num_examples, 1, 1)] = None
            continue
        with suppress(ConfigError):  # what is wrong is told elsewhere
            trial = load(tree)
            kinds[trial.noise, replace(trial.settings, batch_size=1, epochs=1)] = None
    sizes, lengths = ({min(found), max(found)} for found in values.values())
    found = set[tuple[int, float]]()
    for noise, settings in _spread_bands(kinds):
        for size, length in product(sizes, lengths):
            with suppress(InvalidKey):  # no trial has these bands with this batch size
                found.add(noise.schedule(replace(settings, batch_size=size, epochs=length)))
    return tuple(sorted(found))


def _spread_bands(
    kinds: Iterable[tuple[Noise, PublicSettings]],
) -> Iterator[tuple[Noise, PublicSettings]]:
    """Yield the kinds of noise; of many numbers of bands, the ends and the powers of two."""
    numbers: dict[tuple[Noise, PublicSettings], set[int]] = {}
    for noise, settings in kinds:
        if isinstance(noise, Banded) and noise.bands != "auto":
            numbers.setdefault((replace(noise, bands="auto"), settings), set()).add(noise.bands)
        else:
            yield noise, settings
    for (noise, settings), bands in numbers.items():
        assert isinstance(noise, Banded)
        low, high = min(bands), max(bands)
        powers = {2**k for k in range(high.bit_length()) if low < 2**k < high}
        few = bands if len(bands) <= _FEW else {low, high}
        yield from ((replace(noise, bands=b), settings) for b in few | powers)


def _inside(space: Space, base: Tree) -> Iterator[Tree]:
    """Random points; those of which a formula has no value are told when they are proposed."""
    rng = RandomDraw(random.Random(0))
    for _ in range(_SAMPLES):
        with suppress(ConfigError):
            yield space.draw(base, rng)[0]
