"""Data-parallel portions: the devices of a trial share its batch, and one of them has the sum.

A batch is cut into portions as on one device. Portion i is computed on device i mod D by a copy of
the model there, in a thread of its own, and the first device adds the clipped sums in the order of
the portions. So the sum has the bits that one device would give with the same portions.

Threads of one process, and not a process for each device, keep the privacy boundary where it is.
One process has the secret, draws the batch, checks state, adds noise once and releases; no batch
and no sum without noise leaves it. If any part fails, the step fails as a whole.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from dpsweep.core.flat import copy_flat
from dpsweep.core.inputs import Inputs
from dpsweep.core.types import Clipped, Tensors
from dpsweep.privacy.clip import Clip, add_clipped
from dpsweep.privacy.engine.base import Engine, Microbatch, MicrobatchEngine
from dpsweep.privacy.engine.state_guard import deep_copy


@dataclass(frozen=True)
class DataParallelEngine:
    """Clipped sums of a batch whose portions several devices compute side by side.

    Attributes:
        replicas: The engine of each device, with a model of its own there. The first one's device
            has the points, the batch and the sum. All have the same `max_physical_batch`.
    """

    replicas: tuple[MicrobatchEngine, ...]

    @property
    def model(self) -> nn.Module:
        """The first device's."""
        return self.replicas[0].model

    @property
    def max_physical_batch(self) -> int:
        """Examples that each device computes at once."""
        return self.replicas[0].max_physical_batch

    @property
    def copies(self) -> int:
        """Copies in which each example comes."""
        return self.replicas[0].copies

    def clipped_sum(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Inputs,
        targets_B: Inputs,
        clip: Clip,
    ) -> Clipped:
        """See `Engine`."""
        first, num = self.replicas[0], len(self.replicas)
        total = first.empty_sum(points[0], clip)
        inputs_B = first.lay_out(inputs_B)
        portions = first.split(inputs_B, targets_B)

        def compute(
            replica: MicrobatchEngine, own: Sequence[Tensors], portion: Microbatch
        ) -> Clipped:
            with _on_device(replica.device):
                found = replica.sum_portion(own, weights, portion.to(replica.device), clip)
                # copied in this thread, so that one device sends while another still computes
                return Clipped(_copy_to(first.device, found))

        with ExitStack() as stack:
            # threads of this call alone: none outlives it, nor does what a model kept in one
            pool = stack.enter_context(ThreadPoolExecutor(num, "dpsweep-device"))
            guarded = []
            for replica in self.replicas:
                # a model that writes to its parameters would train one device on other points
                copied = [_copy_to(replica.device, point) for point in points]
                guarded.append(stack.enter_context(replica.guard_points(copied)))
            # one portion a device at a time: `map` would take them all, and hold every sum
            while some := list(islice(portions, num)):
                # `map` gives the parts in the order of the portions, whichever was ready first
                for part in list(pool.map(compute, self.replicas, guarded, some)):
                    total = add_clipped(total, part)
        return total


def replicate_engine(
    make: Callable[[nn.Module], Engine], model: nn.Module, devices: Sequence[torch.device]
) -> Engine:
    """Make the engine of a model on `devices`; one of several devices has a copy on each.

    Args:
        make: Makes the engine of one device, with its checks, for a model there.
        model: On the first device, before its first call: what it caches then lies on that device.
        devices: At least one.

    Raises:
        ConfigError: If the model cannot be copied.
    """
    models = [model, *(deep_copy(model).to(device) for device in devices[1:])]
    engines = [make(one) for one in models]
    return join_engines([one for engine in engines for one in engine.replicas])


def join_engines(engines: Sequence[MicrobatchEngine]) -> Engine:
    """Join the engines of several devices to one; the engine of one device is as it was."""
    return engines[0] if len(engines) == 1 else DataParallelEngine(tuple(engines))


def _copy_to(device: torch.device, leaves: Tensors) -> Tensors:
    """Copy named tensors to another device by few kernels; as they are if they lie there."""
    if next(iter(leaves.values())).device == device:
        return leaves
    return dict(zip(leaves, copy_flat(leaves.values(), device=device), strict=True))


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    """Compute in this thread on `device`: torch starts a thread on the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
