"""Number of trials that run at once, and the decision for `resources.gpu: auto`.

Small models leave most of a GPU idle, so several trials share one. How many is worth it is
measured, on the costliest trial of the space: as many as fit its memory with headroom, and no
more than make the GPU do more. The choice is written down with the sweep, and a resumed one
keeps it: a trial computes where it began.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dpsweep.compat import ACCELERATOR_GRAIN, ACCELERATOR_PREFIX
from dpsweep.config.resources import ResourcesConfig
from dpsweep.config.sweep import ResolvedSweep, check_device
from dpsweep.core.disk import format_bytes, write_atomically
from dpsweep.core.errors import ConfigError

NodeResources = Mapping[str, float]
"""Name of a Ray resource -> how much of it a node has: CPU, GPU, memory (bytes)."""

_HEAD_ROOM = 0.1
"""Share of a GPU's memory that nobody is given: batches vary, and allocators set aside."""

_WORTH = 0.1
"""One more trial at a time is to raise the work done in a second by this share, at least."""

_FILE = "resources.json"


@dataclass(frozen=True)
class GpuProbe:
    """Share of one GPU that the costliest trial of a space takes."""

    memory_bytes: int  # what its process takes, libraries included
    total_bytes: int  # what the GPU has
    # processes at once -> seconds that a step of each of them takes
    step_seconds: Mapping[int, float]

    @property
    def fit(self) -> int:
        """Trials whose memory fits beside each other, with headroom; at least 1."""
        return max(1, math.floor((1 - _HEAD_ROOM) * self.total_bytes / self.memory_bytes))


@dataclass(frozen=True)
class Packing:
    """Share of a GPU for each trial, and the reason for it."""

    gpu: float  # GPUs of a trial: a share, or 0
    words: str  # why, in a sentence


NO_GPU = Packing(
    0.0, "resources.gpu: auto: the cluster has no GPU, or hides it; trials run on CPUs"
)


def choose_packing(measured: GpuProbe) -> Packing:
    """The fewest trials at once whose work per second is within a tenth of the best that fits.

    >>> choose_packing(GpuProbe(10, 100, {1: 0.1, 2: 0.11, 4: 0.2})).gpu
    0.5
    """
    fit = {k: s for k, s in measured.step_seconds.items() if k <= measured.fit}
    best = max(k / seconds for k, seconds in fit.items())
    chosen = min(k for k, seconds in fit.items() if k / seconds >= (1 - _WORTH) * best)
    gain = chosen / fit[chosen] * fit[1]
    timed = ", ".join(f"{1000 * s:.0f} ms with {k} at once" for k, s in sorted(fit.items()))
    return Packing(
        math.floor(1e4 / chosen) / 1e4,
        f"resources.gpu: auto: {chosen} trials on a GPU, {gain:.1f} times the work of one. The "
        f"costliest takes {format_bytes(measured.memory_bytes)} of "
        f"{format_bytes(measured.total_bytes)}, and a step {timed}",
    )


def choose_next_count(measured: GpuProbe, most: int) -> int | None:
    """Choose the number of processes to measure next; None if more cannot help.

    Args:
        measured: What is known, from one process on.
        most: That the CPUs of a GPU's node allow.
    """
    known = sorted(measured.step_seconds)
    bound = min(measured.fit, most)
    if known[-1] >= bound:
        return None
    if len(known) > 1:
        before, now = (k / measured.step_seconds[k] for k in known[-2:])
        if now < (1 + _WORTH) * before:
            return None
    return min(bound, 2 * known[-1])


def get_memory_share(resources: ResourcesConfig) -> float:
    """Share of a GPU's memory that a trial may take, in (0, 1]."""
    return compute_memory_share(resources.num_gpus)


def compute_memory_share(num_gpus: float) -> float:
    """Share of a GPU's memory for a trial that is given `num_gpus`; 1 for a trial without."""
    return (1 - _HEAD_ROOM) * num_gpus if 0 < num_gpus < 1 else 1.0


def get_total_memory() -> int:
    """Bytes of memory that this machine has."""
    return math.prod(os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES"))


def get_local_resources(resources: ResourcesConfig) -> dict[str, float]:
    """Get this machine's resources in Ray's terms; GPU and memory only if a trial asks for them."""
    return {
        "CPU": float(os.cpu_count() or 1),
        "GPU": float(math.ceil(resources.num_gpus)),
        "memory": float(max(resources.memory_bytes, get_total_memory())),
        **select_cards(resources),
    }


def make_bundle(resources: ResourcesConfig) -> dict[str, float]:
    """Resources of one trial in Ray's terms; for `auto`, a whole GPU."""
    gpu = 1.0 if resources.gpu == "auto" else resources.num_gpus
    bundle = {"CPU": float(resources.cpu), "GPU": gpu, "memory": float(resources.memory_bytes)}
    return {name: amount for name, amount in bundle.items() if amount} | select_cards(resources)


def select_cards(resources: ResourcesConfig) -> dict[str, float]:
    """The custom resource of nodes with the wanted type of GPU, in Ray's terms; empty for any."""
    if resources.accelerator is None:
        return {}
    return {f"{ACCELERATOR_PREFIX}{resources.accelerator}": ACCELERATOR_GRAIN}


def count_trials_per_node(resources: ResourcesConfig, has: NodeResources) -> int:
    """Trials that fit one node at once.

    >>> count_trials_per_node(ResourcesConfig(cpu=1, gpu=0.4), {"CPU": 16, "GPU": 2})
    4
    """
    if any(not has.get(name) for name in select_cards(resources)):
        return 0
    capacities = [int(has.get("CPU", 0.0) // resources.cpu)]
    if gpu := resources.num_gpus:
        cards = has.get("GPU", 0.0)
        capacities.append(int(cards // gpu) if gpu >= 1 else int(cards) * int(1 / gpu + 1e-6))
    if resources.memory_bytes:
        capacities.append(int(has.get("memory", 0.0) // resources.memory_bytes))
    return min(capacities)


def count_concurrent_trials(resources: ResourcesConfig, nodes: Sequence[NodeResources]) -> int:
    """Count the trials of a sweep that run at once on a cluster of such nodes, if they are idle.

    Raises:
        ConfigError: If not even one does.
    """
    capacities = sum(count_trials_per_node(resources, has) for has in nodes)
    if capacities < 1:
        asked = [f"{resources.cpu} CPU", f"{resources.num_gpus:g} GPU"]
        asked += [f"{resources.memory} of memory"] if resources.memory else []
        asked += [f"a card of type {resources.accelerator}"] if resources.accelerator else []
        found = [_format_resources(has, resources) for has in nodes]
        types = _list_types(nodes, resources)
        raise ConfigError(
            f"resources: a trial takes {' and '.join(asked)}, and no node of the cluster has that: "
            f"{'; '.join(found) or 'there is none'}. Ask for less, with --set resources.cpu=1 or "
            f"resources.gpu=0, or join a larger cluster with --address{types}"
        )
    return min(capacities, resources.max_concurrent or capacities)


def with_packing(sweep: ResolvedSweep, packing: Packing) -> ResolvedSweep:
    """The sweep with what was decided in place of `auto`.

    Raises:
        ConfigError: If it names a device that trials do not have.
    """
    resources = sweep.config.resources.model_copy(update={"gpu": packing.gpu})
    sweep = replace(sweep, config=sweep.config.model_copy(update={"resources": resources}))
    check_device(sweep)
    return sweep


def store_packing(folder: Path, packing: Packing) -> None:
    """Keep the choice with the sweep."""
    write_atomically(folder / _FILE, json.dumps(asdict(packing), indent=1).encode())


def read_packing(folder: Path) -> Packing | None:
    """The choice of an earlier driver; None if there is none."""
    place = folder / _FILE
    return Packing(**json.loads(place.read_text())) if place.exists() else None


def make_idle_gpu_warning(resources: ResourcesConfig, nodes: Sequence[NodeResources]) -> str:
    """Make the warning about GPUs that stay idle; empty if none does."""
    idle = sum(has.get("GPU", 0.0) for has in nodes)
    if resources.gpu == 0 and idle:
        return (
            f"resources.gpu is 0: trials run on CPUs, and the {idle:g} GPUs of the cluster are not "
            f"used. To use them: --set resources.gpu=auto"
        )
    return ""


def _list_types(nodes: Sequence[NodeResources], resources: ResourcesConfig) -> str:
    """List the types of cards that are there, where one was asked for."""
    if resources.accelerator is None:
        return ""
    known = {
        name.removeprefix(ACCELERATOR_PREFIX)
        for has in nodes
        for name in has
        if name.startswith(ACCELERATOR_PREFIX)
    }
    return f". Types of cards that are there: {', '.join(sorted(known)) or 'none'}"


def _format_resources(has: NodeResources, resources: ResourcesConfig) -> str:
    memory = f", {format_bytes(has.get('memory', 0.0))}" if resources.memory else ""
    return f"{has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU{memory}"
