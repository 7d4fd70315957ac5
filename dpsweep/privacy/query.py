"""Where in parameter space each example's gradient is asked for.

A query is a weighted list of public points. Example i answers with the weighted sum
of its gradients there; that sum, not each gradient, is clipped. The points depend
only on past iterates, which are public, so a longer query costs compute, not privacy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dpsweep.core.types import Tensors


@dataclass(frozen=True)
class Ask:
    """`weight` times the gradient at x_t + ahead * (x_t - x_{t-1}).

    Attributes:
        weight: Share of this point's gradient in the answer; may be negative.
        ahead: How far past the newest iterate, in units of the last step; may be negative.
    """

    weight: float
    ahead: float = 0.0

    @property
    def memory(self) -> int:
        """How many iterates, the newest included, `point` looks at."""
        return 2 if self.ahead else 1

    def point(self, trail: Sequence[Tensors]) -> Tensors:
        """The point itself. `trail` holds iterates, newest last; before the second, d_t is 0."""
        now = trail[-1]
        if not self.ahead or len(trail) < 2:
            return now
        before = trail[-2]
        return {k: x + self.ahead * (x - before[k]) for k, x in now.items()}


Query = tuple[Ask, ...]
HERE: Query = (Ask(weight=1.0),)


def memory(query: Query) -> int:
    """How many iterates the whole query needs to be kept."""
    return max(ask.memory for ask in query)
