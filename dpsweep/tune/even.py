"""The first trials of a search that learns, drawn so that they cover every key evenly.

Each trial costs privacy, and a search has few. Of four random draws all lie in one half of a range
in one search of eight; here 2, 4, 8, ... draws of a key lie one in each half, quarter, eighth, and
so on, while pairs of keys stay random (Owen, Randomly permuted (t,m,s)-nets, 1995, in one dimension
at a time: van der Corput's sequence with a nested scramble of its own for every key). Keys may come
and go with branches, which a sequence in several dimensions does not allow.
"""

import math

from dpsweep.config.space import Labels, Range, Slot
from dpsweep.core.seeds import public_seed
from dpsweep.tune.space import Turns

_BITS = 32


class Even:
    """Draws for one trial.

    Args:
        seed: The sweep's.
        place: The trial's, among those of the search.
        turns: What that comes to where methods or budgets go in turn: which of them it is, and
            which of its trials. Each has a sequence of its own.
    """

    def __init__(self, seed: int, place: int, turns: tuple[int, int]) -> None:
        self._seed, self._turns = seed, Turns(place)
        self._whose, self._index = turns

    def number(self, slot: Slot, domain: Range) -> float | int:
        """A number in the range."""
        share, low, high = self._share(slot.name), domain.low, domain.high
        if domain.is_whole:
            low, high = low - 0.5, high + 0.5
        number = low * (high / low) ** share if domain.is_log else low + share * (high - low)
        number = min(max(number, domain.low), domain.high)
        return min(math.floor(number + 0.5), int(domain.high)) if domain.is_whole else number

    def option(self, slot: Slot, labels: Labels) -> int:
        """Index of one of the labels."""
        return int(self._share(slot.name) * len(labels))

    def turn(self, slot: Slot, labels: Labels) -> int:
        """Index of the label whose turn it is."""
        return self._turns.take(len(labels))

    def _share(self, name: str) -> float:
        """In [0, 1)."""
        return scrambled(self._index, public_seed(self._seed, "even", self._whose, name))


def scrambled(index: int, seed: int) -> float:
    """A point of van der Corput's sequence in [0, 1), under the nested scramble of a seed.

    >>> sorted(int(4 * scrambled(index, seed=7)) for index in range(8, 12))
    [0, 1, 2, 3]
    """
    share = 0.0
    for bit in range(_BITS):
        earlier = index % 2**bit  # the digits before, which decide how this one is scrambled
        flipped = public_seed(seed, bit, earlier) & 1
        share += ((index >> bit & 1) ^ flipped) / 2 ** (bit + 1)
    return share
