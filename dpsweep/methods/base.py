"""Methods: a query, noise, filters of its releases, and a base optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dpsweep.core.strict import Strict
from dpsweep.filters.base import Chain, Filter
from dpsweep.privacy.correlated import INDEPENDENT, Noise
from dpsweep.privacy.geometry import Spectral
from dpsweep.privacy.query import NEWEST_ITERATE, Query


@dataclass(frozen=True)
class Method:
    """A way of training with DP. The release between query and filters is the same for all."""

    # public points each example is asked at. Their weighted sum is clipped
    query: Query = NEWEST_ITERATE
    # what the released gradient passes, in order, before the base optimizer
    filters: tuple[Filter, ...] = ()
    # the space in which gradients are clipped; the parameters' own if None
    geometry: Spectral | None = None
    noise: Noise = INDEPENDENT  # independent from step to step, or correlated

    @property
    def chain(self) -> Chain:
        """The filters as one."""
        return Chain(self.filters)


@dataclass(frozen=True)
class Entry:
    """One line of the table of methods."""

    config: type[Strict]  # the method's tunables
    build: Callable[[Any], Method]  # config -> Method
    bases: tuple[str, ...]  # names of the base optimizers it may have; the first is its own
    paper: str  # where it is described
    # what is searched by default, as `search:` in a sweep file has it, with the total step around a
    # usual default; a sweep has that of its own data, model and epsilon
    space: Mapping[str, Any]
    clipping: str = "flat"  # the style of clipping it has where a file says nothing

    @classmethod
    def of(
        cls, module: ModuleType, bases: tuple[str, ...], paper: str, clipping: str = "flat"
    ) -> "Entry":
        """The line of a method's module, which has Config, build and SPACE, of its own keys."""
        shared = {"optimizer.total_step": _around(4 if bases[0].startswith("adam") else 800)}
        shared |= {"privacy.clip_norm": {"log_uniform": [0.1, 1.0]}}
        space = {**shared, **module.SPACE}
        return cls(module.Config, module.build, bases, paper, space, clipping)


STEP_FACTOR = 4
"""The default range of the total step goes from the default by it to the default times it."""


def _around(total_step: float) -> dict[str, list[float]]:
    return {"log_uniform": [total_step / STEP_FACTOR, total_step * STEP_FACTOR]}
