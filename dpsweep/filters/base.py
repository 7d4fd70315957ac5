"""Filters: their interface, their public inputs, and chains of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dpsweep.core.types import Released, Tensors

if TYPE_CHECKING:
    import torch

State = Any
"""A filter's memory: None, numbers, tensors, and tuples or dicts of these.

Never changed in place, and saved by torch.save with weights_only.
"""


_FREQUENCIES = 2**19


@dataclass(frozen=True)
class Public:
    """Public values of a step, known without another query of the data.

    The training loss, the true batch size and gradient norms are private: never add them.
    """

    step: int  # steps taken so far; 0 on the first call
    params: Tensors  # current iterate, leaf shape (*param.shape)
    # standard deviation, per coordinate, of the noise in the released gradient, in gradient units
    # (clip_norm * noise_multiplier / batch_size)
    noise_std: float


class Filter(Protocol):
    """A causal map from a stream of released gradients to a stream of updates."""

    over_time: ClassVar[bool]
    """True if it mixes steps; False if it mixes the coordinates of one step."""

    @property
    def noise_gain(self) -> float:
        """Output variance per unit of white input variance, in the steady state."""

    @property
    def dc_gain(self) -> float:
        """Gain at frequency zero: what a constant gradient is multiplied by in the end."""

    def frequency_response(self, at: Any) -> torch.Tensor:
        """Gain at each frequency; see the module of the filter for what `at` is."""

    def init(self, params: Tensors) -> State:
        """Return the state before the first step, on the devices of `params`."""

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        """Return the filtered gradient and the next state; leave `grad` unchanged."""


class Gain(Filter, Protocol):
    """A filter g~_t = (1 - k_t) g~_{t-1} + k_t r_t whose gain is known before training.

    DiSK's query needs it: the weights of its two points are functions of k_t.
    """

    def gain_at(self, step: int) -> float:
        """k_t, in (0, 1]: the weight of the newest gradient at `step`, counted from 0."""


@dataclass(frozen=True)
class Chain:
    """Filters in series: each filters the output of the one before. Empty, it is the identity."""

    links: tuple[Filter, ...]  # the filters, the one that sees the released gradient first

    @property
    def noise_gain(self) -> float:
        """Output variance of the whole chain per unit of white input variance, in the steady state.

        Filters over coordinates and filters over time multiply their gains. Two of one kind do
        not, since the first one's output is no longer white: theirs is the mean of
        |H_1|^2 |H_2|^2 ... over the spectrum, here at half a million frequencies.
        """
        import torch

        circle = torch.arange(_FREQUENCIES, dtype=torch.float64) * (2 * pi / _FREQUENCIES)
        over_time = [link for link in self.links if link.over_time]
        across = [link for link in self.links if not link.over_time]
        return _multiply_gains(over_time, circle) * _multiply_gains(across, 2 * _FREQUENCIES)

    @property
    def dc_gain(self) -> float:
        """The product of the links'."""
        return prod(link.dc_gain for link in self.links)

    def init(self, params: Tensors) -> State:
        return tuple(link.init(params) for link in self.links)

    def apply(self, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        after = []
        for link, memory in zip(self.links, state, strict=True):
            grad, memory = link.apply(grad, memory, public)
            after.append(memory)
        return grad, tuple(after)


def _multiply_gains(links: list[Filter], at: Any) -> float:
    """Compute the noise gain of filters of one kind in series; `at` are the frequencies."""
    if len(links) < 2:
        return prod(link.noise_gain for link in links)
    import torch

    responses = torch.stack([link.frequency_response(at).abs() for link in links])
    return float(responses.prod(0).square().mean())
