"""Ways through a space that need no Optuna: its corners, and random points."""

import random
from collections.abc import Callable, Iterator
from typing import TypeVar

from dpsweep.config.space.domains import Labels, Range, Slot

Drawn = TypeVar("Drawn")


class Corner:
    """Draws the `picks`-th end or option of each key, the first where nothing is said."""

    def __init__(self, picks: dict[str, int] | None = None) -> None:
        self.picks = picks or {}
        self.sizes: dict[str, int] = {}

    def number(self, slot: Slot, domain: Range) -> float | int:
        self.sizes[slot.name] = 2
        return (domain.low, domain.high)[self.picks.get(slot.name, 0)]

    def option(self, slot: Slot, labels: Labels) -> int:
        self.sizes[slot.name] = len(labels)
        return self.picks.get(slot.name, 0)

    turn = option

    def others(self) -> list["Corner"]:
        return [Corner({name: i}) for name, size in self.sizes.items() for i in range(1, size)]


def walk_corners(draw: Callable[[Corner], Drawn]) -> Iterator[Drawn]:
    """What is drawn at every end and option, one at a time, the rest at their first."""
    seen = Corner()
    yield draw(seen)
    todo = seen.others()
    while todo:
        corner = todo.pop()
        yield draw(corner)
        new = {k: v for k, v in corner.sizes.items() if k not in seen.sizes}
        seen.sizes.update(new)
        todo += [Corner({**corner.picks, k: i}) for k, n in new.items() for i in range(1, n)]


class RandomDraw:
    """Draws at random, as the random sampler would."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def number(self, slot: Slot, domain: Range) -> float | int:
        if domain.is_whole:
            return self.rng.randint(int(domain.low), int(domain.high))
        if domain.is_log:
            return float(domain.low * (domain.high / domain.low) ** self.rng.random())
        return self.rng.uniform(domain.low, domain.high)

    def option(self, slot: Slot, labels: Labels) -> int:
        return self.rng.randrange(len(labels))

    turn = option
