"""Measurement of what the costliest trial of a space takes of a GPU, by a few seconds of its steps.

A Ray task with a whole GPU starts the processes, first one, then several at once, which all take
steps during the same seconds. Nothing that they compute leaves them but times and bytes.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core import memory
from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import Secret
from dpsweep.execution.resources import (
    NO_GPU,
    GpuProbe,
    NodeResources,
    Packing,
    choose_next_count,
    choose_packing,
    compute_memory_share,
    count_concurrent_trials,
    get_total_memory,
    select_cards,
)
from dpsweep.methods import build_method
from dpsweep.models import build_model
from dpsweep.privacy.engine.size import estimate_bytes_per_example
from dpsweep.training.allowance import Allowance
from dpsweep.training.assemble import assemble_step, initial_params
from dpsweep.training.device import open_device
from dpsweep.training.step import Progress, Step

_SAMPLES, _SECONDS, _FEWEST_STEPS = 8, 3.0, 3
_LATE = 1000
"""A step at which all points of a query exist."""


def decide_packing(sweep: ResolvedSweep, nodes: Sequence[NodeResources]) -> Packing:
    """Decide how many trials share a GPU, by a measurement on one of the cluster's."""
    cards = select_cards(sweep.config.resources)
    with_gpu = [has for has in nodes if has.get("GPU", 0.0) >= 1 and all(map(has.get, cards))]
    if not with_gpu:
        if cards:  # a card of that type was asked for: to go on without one would be another sweep
            count_concurrent_trials(sweep.config.resources.model_copy(update={"gpu": 1.0}), nodes)
        return NO_GPU
    cpu = sweep.config.resources.cpu
    most = max(1, min(int(has.get("CPU", 0.0) / has["GPU"] / cpu) for has in with_gpu))
    config = find_costliest_trial(sweep).model_dump(mode="json")
    task = ray.remote(num_gpus=1, num_cpus=0, max_retries=0, resources=cards)(measure_gpu)
    try:
        found = ray.get(task.remote(config, most, cpu, "cuda"))
    except RayError as e:  # no driver there, or one too old for torch
        raise ConfigError(
            f"resources.gpu: auto: the costliest trial did not run on a GPU of the cluster: "
            f"{next(reversed(str(e).strip().splitlines()), type(e).__name__)}. Look at its nodes "
            f"with: dpsweep doctor --address ADDRESS; or give a number, such as resources.gpu: 1"
        ) from e
    return choose_packing(GpuProbe(**found))


def find_costliest_trial(sweep: ResolvedSweep) -> TrialConfig:
    """The trial of the space whose step takes the most memory, by its batch and its model."""
    configs = [*filter(sweep.admits, sweep.corners), *sweep.samples(_SAMPLES)]
    each: dict[str, int] = {}
    for config in configs:
        key = config.model.model_dump_json()
        if key not in each:
            model = build_model(config.model, config.data.spec, config.seed)
            each[key] = estimate_bytes_per_example(model, config.data.spec.inputs, "bookkeeping")

    def step_bytes(config: TrialConfig) -> int:
        train = config.train
        at_once = train.batch_size
        if train.max_physical_batch != "auto":
            at_once = min(at_once, train.max_physical_batch)
        points = len(build_method(config.method).query.evaluation_points(_LATE))
        return at_once * config.copies * points * each[config.model.model_dump_json()]

    return max(configs, key=step_bytes)


def measure_gpu(config: dict[str, Any], most: int, threads: int, device: str) -> dict[str, Any]:
    """A `GpuProbe` as plain values, of the device that this process was given.

    Args:
        most: Processes at once, at most.
        threads: CPU threads of each.
        device: cuda or cpu.
    """
    (alone,) = _measure_side_by_side(1, config, threads, device)
    seconds, held, total = alone
    found = GpuProbe(held, total, {1: seconds})
    while (num := choose_next_count(found, most)) is not None:
        try:
            side_by_side = _measure_side_by_side(num, config, threads, device)
        except (RuntimeError, MemoryError):  # so many do not fit, whatever one takes
            break
        slowest = max(seconds for seconds, _, _ in side_by_side)
        # with a smaller share a trial computes fewer examples at once, and holds less
        held = max(bytes_held for _, bytes_held, _ in side_by_side)
        found = GpuProbe(held, total, {**found.step_seconds, num: slowest})
    return asdict(found)


def _measure_side_by_side(
    num: int, config: dict[str, Any], threads: int, device: str
) -> list[tuple[float, int, int]]:
    """Seconds of a step, bytes taken and bytes there are, of `num` processes side by side."""
    context = get_context("spawn")
    ready = context.Barrier(num)
    with ProcessPoolExecutor(num, context, initializer=_wait_at_barrier, initargs=(ready,)) as pool:
        share = compute_memory_share(1 / num)
        told = [pool.submit(_probe, config, threads, device, share) for _ in range(num)]
        return [one.result() for one in told]


_ready: Barrier | None = None


def _wait_at_barrier(ready: Barrier) -> None:
    global _ready
    _ready = ready


def _probe(
    config: dict[str, Any], threads: int, device: str, gpu_share: float
) -> tuple[float, int, int]:
    assert _ready is not None
    torch.set_num_threads(threads)
    trial = TrialConfig.model_validate(config)
    try:
        place = open_device(device, gpu_share)
        step = assemble_step(trial, Secret.draw(), place, allowance=Allowance(gpu_share=gpu_share))
        progress = step.start(initial_params(step))
        step(progress)  # kernels are chosen and memory is set aside
    except BaseException:
        _ready.abort()  # nobody waits for this one
        raise
    _ready.wait()
    seconds = _time_step(
        step, progress, (torch.cuda.synchronize if place.type == "cuda" else lambda: None)
    )
    return (seconds, *_read_memory(place))


def _time_step(step: Step, progress: Progress, wait: Callable[[], None]) -> float:
    wait()
    taken, start = 0, time.perf_counter()
    while taken < _FEWEST_STEPS or time.perf_counter() - start < _SECONDS:
        step(progress)
        wait()
        taken += 1
    return (time.perf_counter() - start) / taken


def _read_memory(place: torch.device) -> tuple[int, int]:
    """Bytes this process takes at its peak, libraries included, and bytes that there are."""
    if place.type == "cuda":
        free, total = torch.cuda.mem_get_info(place)
        besides = max(0, total - free - torch.cuda.memory_reserved(place))
        return torch.cuda.max_memory_reserved(place) + besides, total
    return memory.private_bytes(), get_total_memory()
