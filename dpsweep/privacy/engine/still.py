"""What must not change while examples answer: weights and buffers.

A layer that writes to them carries what the sampled examples did past clipping and noise, into the
iterate or into what is saved. Most such layers are found before the first step (doubt.py); some
write only once weights have grown or inputs are unusual, so every batch is watched. Values are
compared, bit by bit: what is written through `.data` leaves no other trace.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dpsweep.core.errors import ConfigError

_REMEDY = (
    "that would carry what examples did past clipping and noise. Use layers without a memory of "
    "their own"
)


class Still:
    """Weights and buffers as they were before a batch.

    Args:
        state: Gives what each is called in an error, and the tensor.
    """

    def __init__(self, state: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._state = state
        self._before = [(name, leaf, leaf.detach().clone()) for name, leaf in state()]

    def check(self) -> None:
        """Raises ConfigError if one of them holds another number, or is another tensor now."""
        now = list(self._state())
        if [name for name, _ in now] != [name for name, *_ in self._before]:
            raise ConfigError(f"model: it has other buffers after a batch than before: {_REMEDY}")
        found = [
            (name, torch.ones((), dtype=torch.bool) if leaf is not was else _differ(leaf, copy))
            for (name, leaf), (_, was, copy) in zip(now, self._before, strict=True)
        ]
        if any(torch.stack([differs.to(now[0][1].device) for _, differs in found]).tolist()):
            name = next(name for name, differs in found if differs)
            raise ConfigError(f"model: its {name} changes as examples are asked: {_REMEDY}")


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether a bit differs; a NaN is like itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.ones((), dtype=torch.bool)
    same = (one == other) | ((one != one) & (other != other))
    return ~same.all()
