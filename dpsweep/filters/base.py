"""What a filter is, what it may know, and how several make one."""

from dataclasses import dataclass
from typing import Any, Protocol

from dpsweep.core.types import Released, Tensors

State = Any
"""A filter's memory: None, tensors, and tuples or dicts of these (torch.save with weights_only)."""


@dataclass(frozen=True)
class Public:
    """What every step may know without asking the data again.

    The training loss, the true batch size and gradient norms are private: never add them.

    Attributes:
        step: Steps taken so far; 0 on the first call.
        params: Current iterate, leaf shape (*param.shape).
        noise_std: Standard deviation, per coordinate, of the noise in the released
            gradient, in gradient units (clip_norm * noise_multiplier / batch_size).
    """

    step: int
    params: Tensors
    noise_std: float


class Filter(Protocol):
    """A causal map from a stream of released gradients to a stream of updates."""

    @property
    def noise_gain(self) -> float:
        """Output variance per unit of white input variance, in the steady state."""

    def init(self, params: Tensors) -> State:
        """Returns the state before the first step, on the devices of `params`."""

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        """Returns the filtered gradient and the next state; leaves `grad` unchanged."""


@dataclass(frozen=True)
class Chain:
    """Filters in a row: each filters what the one before it gave. Empty, it is no filter.

    Attributes:
        links: The filters, the one that sees the released gradient first.
    """

    links: tuple[Filter, ...]

    def init(self, params: Tensors) -> State:
        return tuple(link.init(params) for link in self.links)

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        after = []
        for link, memory in zip(self.links, state, strict=True):
            grad, memory = link.apply(grad, memory, public)
            after.append(memory)
        return grad, tuple(after)
