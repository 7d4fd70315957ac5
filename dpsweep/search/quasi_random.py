"""The first trials of a search that learns, drawn so that they cover every key evenly.

Each trial costs privacy, and a search has few. Of four random draws all lie in one half of a range
in one search of eight; here 2, 4, 8, ... draws of a key lie one in each half, quarter, eighth, and
so on, while keys are as good as independent of each other: van der Corput's sequence for every key,
with an order and a nested scramble of its own (Owen 1995; Burley 2020). Keys may come and go with
branches, which a sequence in several dimensions does not allow.
"""

import math

from dpsweep.config.space.domains import Labels, Range, Slot
from dpsweep.config.space.suggest import RoundRobin
from dpsweep.core.seeds import derive_public_seed

_BITS = 32


class QuasiRandomDraw:
    """Draws for one trial.

    Args:
        seed: The sweep's.
        place: The trial's, among those of the search.
        turns: What that comes to where methods or budgets go in turn: which of them it is, and
            which of its trials. Each has a sequence of its own.
    """

    def __init__(self, seed: int, place: int, turns: tuple[int, int]) -> None:
        self._seed, self._turns = seed, RoundRobin(place)
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

    def choose_label(self, slot: Slot, labels: Labels) -> int:
        """Index of the label whose turn it is."""
        return self._turns.take(len(labels))

    def _share(self, name: str) -> float:
        """In [0, 1)."""
        return compute_scrambled_point(
            self._index, derive_public_seed(self._seed, "even", self._whose, name)
        )


def compute_scrambled_point(index: int, seed: int) -> float:
    """A point of van der Corput's sequence in [0, 1), in a seed's order and under its scramble.

    The order mixes the first 2, 4, 8, ... points among themselves. Without it the first digit of
    one key would follow from that of another.

    >>> sorted(int(4 * compute_scrambled_point(index, seed=7)) for index in range(8, 12))
    [0, 1, 2, 3]
    """
    order = sum(_scramble_bit(index >> bit, seed, "order", bit) << bit for bit in range(_BITS))
    share = 0.0
    for bit in range(_BITS):
        earlier = order % 2**bit  # the digits before, which decide how this one is scrambled
        digit = (order >> bit & 1) ^ (derive_public_seed(seed, "digit", bit, earlier) & 1)
        share += digit / 2 ** (bit + 1)
    return share


def _scramble_bit(bits: int, seed: int, what: str, place: int) -> int:
    """The last of these bits, or its opposite, as those before it decide."""
    return (bits & 1) ^ (derive_public_seed(seed, what, place, bits >> 1) & 1)
