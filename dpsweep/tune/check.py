"""Everything that can be found wrong before a sweep begins, and what it will cost."""

import time
from dataclasses import dataclass

import torch

from dpsweep.config.sweep import Sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.track.mlflow import check_reachable
from dpsweep.train.assemble import assemble, initial
from dpsweep.train.budget import budget
from dpsweep.train.promise import trial_promise
from dpsweep.tune.charge import search_promise
from dpsweep.tune.state import State

_PROBE_STEPS = 3


def check_services(sweep: Sweep, state: State, tracking_uri: str | None) -> None:
    """Raises if the state cannot be written, the name is taken or the tracking server is away."""
    state.check_writable()
    if state.sweep(sweep.name).path.exists():
        raise state.sweep(sweep.name).taken()
    if tracking_uri:
        check_reachable(tracking_uri)


@dataclass(frozen=True)
class Plan:
    """What a sweep will do.

    Attributes:
        trials: How many.
        at_once: How many fit this machine.
        noise: Smallest and largest noise multiplier over the space.
        steps: Fewest and most steps of a trial.
        delta: Failure probability.
        trial_words: The promise of one trial.
        search_words: The promise of the whole search.
        seconds: Time the trials will take here, from a probe of a few steps.
        disk_bytes: Resume state of the running trials, at most.
    """

    trials: int
    at_once: int
    noise: tuple[float, float]
    steps: tuple[int, int]
    delta: float
    trial_words: str
    search_words: str
    seconds: float
    disk_bytes: int


def plan(sweep: Sweep, at_once: int) -> Plan:
    """Calibrates the noise over the space, and times a few steps of three of its trials."""
    trials = sweep.config.budget.trials
    configs = [*sweep.corners(), *sweep.samples(8)]
    budgets = [budget(config) for config in configs]
    probes = [_probe(config) for config in configs[-3:]]
    times = [seconds * b.run.steps for (seconds, _), b in zip(probes, budgets[-3:], strict=True)]
    runs = [b.run for b in budgets]
    return Plan(
        trials=trials,
        at_once=at_once,
        noise=(min(r.noise_multiplier for r in runs), max(r.noise_multiplier for r in runs)),
        steps=(min(r.steps for r in runs), max(r.steps for r in runs)),
        delta=budgets[0].delta,
        trial_words=trial_promise(configs[0], budgets[0].epsilon, runs[0].noise_multiplier),
        search_words=search_promise(sweep, [runs[i % len(runs)] for i in range(trials)]),
        seconds=sum(times) / len(times) * trials / at_once,
        disk_bytes=at_once * max(size for _, size in probes),
    )


def _probe(config: TrialConfig) -> tuple[float, int]:
    """Seconds of one step, and bytes of a checkpoint; nothing trained is kept or shown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.train.threads or threads)
    step = assemble(config, Secret.draw(), torch.device("cpu"))
    progress = step.start(initial(step))
    step(progress)
    start = time.perf_counter()
    for _ in range(_PROBE_STEPS):
        step(progress)
    seconds = (time.perf_counter() - start) / _PROBE_STEPS
    torch.set_num_threads(threads)
    size = sum(x.nbytes for x in progress.params.values())
    copies = 2 + len(progress.trail) + 2 * (config.optimizer.name != "sgd")
    return seconds, size * copies
