"""What a method is: where it asks, and what it does to the released answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpsweep.core.strict import Strict
from dpsweep.filters.base import Chain, Filter
from dpsweep.privacy.query import HERE, Query


@dataclass(frozen=True)
class Method:
    """A way of training with DP. The release between query and filters is the same for all.

    Attributes:
        query: Public points each example is asked at. Their weighted sum is clipped.
        filters: What the released gradient passes, in order, before the base optimizer.
    """

    query: Query = HERE
    filters: tuple[Filter, ...] = ()

    @property
    def chain(self) -> Chain:
        """The filters as one."""
        return Chain(self.filters)


@dataclass(frozen=True)
class Entry:
    """One line of the table of methods.

    Attributes:
        config: The method's tunables.
        build: Config -> Method.
        bases: Names of the base optimizers it may have; the first is its own.
        paper: Where it is described.
    """

    config: type[Strict]
    build: Callable[[Any], Method]
    bases: tuple[str, ...]
    paper: str
