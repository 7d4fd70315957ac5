"""Everything that can be found wrong before a sweep begins, and what it will cost."""

import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import TypeVar

import torch
from sqlalchemy.engine import make_url

from dpsweep.config.plan import PrivacyPlan, plan_privacy, statement_of_trial
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.disk import format_bytes
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.seeds import Secret
from dpsweep.execution.disk_use import check_disk_space, estimate_disk_bytes, history_bytes
from dpsweep.privacy.correlated import predict_error
from dpsweep.privacy.statement import PRUNING_STATEMENT, search_statement
from dpsweep.privacy.ways import USUAL_SHARE, Ways, ways_to_spend
from dpsweep.search.charge import compute_search_privacy
from dpsweep.store.filesystem import check_local
from dpsweep.store.owner import whoami
from dpsweep.store.state_dir import StateFolder
from dpsweep.tracking.server import add_driver, is_server, redact_password, refuse_password
from dpsweep.training.assemble import assemble_step, initial_params
from dpsweep.training.evaluate import evaluate
from dpsweep.training.malloc import keep_freed_memory
from dpsweep.training.step import Progress, Step

T = TypeVar("T")

_PROBES, _MOST_PROBES, _PROBE_STEPS = 4, 8, 5
_SAMPLES = 8
"""Points inside the space that are planned beside its corners."""

_CORRELATIONS = 4
"""Kinds of correlated noise that a plan describes, at most."""

_REPORT_SECONDS = 0.03
"""A checkpoint written, and a row on its way through Ray to study and spool."""


def check_services(
    sweep: ResolvedSweep,
    state: StateFolder,
    tracking_uri: str | None,
    storage_uri: str | None = None,
) -> None:
    """Raise if the state cannot be written or has no space, the name is taken or a server away."""
    from dpsweep.store.storage import check_storage
    from dpsweep.tracking.access import PASSWORDS
    from dpsweep.tracking.mlflow import check_reachable

    refuse_password("--tracking-uri", tracking_uri, PASSWORDS)
    state.check_writable()
    if state.sweep(sweep.name).path.exists():
        raise state.sweep(sweep.name).make_name_taken_error()
    check_files(state, tracking_uri, storage_uri)
    _check_apart(tracking_uri, storage_uri)
    check_disk_space(sweep, state.root)
    if storage_uri:
        check_storage(storage_uri, sweep.name, whoami())
    if tracking_uri:
        check_reachable(tracking_uri)


def check_files(state: StateFolder, tracking_uri: str | None, storage_uri: str | None) -> None:
    """Raise StateError if a SQLite file that is to be used lies where machines share it."""
    local = "Name a folder on a disk of this machine with --state FOLDER, or a server with"
    server = "--storage postgresql://USER@HOST/DATABASE"
    _check_file(storage_uri or state.storage_uri, "the study", f"{local} {server}")
    server = "--tracking-uri http://HOST:5000"
    _check_file(tracking_uri or state.tracking_uri, "tracking", f"{local} {server}")


def _check_file(uri: str, what: str, remedy: str) -> None:
    if uri.startswith("sqlite:///"):
        check_local(Path(uri.removeprefix("sqlite:///")).absolute(), what, remedy)


def _check_apart(tracking_uri: str | None, storage_uri: str | None) -> None:
    """Raise ConfigError if both are one database.

    Optuna and MLflow each note the version of their tables in one called alembic_version, and
    would take the other's for a version of their own.
    """
    if not tracking_uri or not storage_uri or is_server(tracking_uri):
        return
    tracking, storage = make_url(add_driver(tracking_uri)), make_url(add_driver(storage_uri))
    if (tracking.host, tracking.port, tracking.database) == (
        storage.host,
        storage.port,
        storage.database,
    ):
        raise ConfigError(
            f"--tracking-uri {redact_password(tracking_uri)}: is the study's database as well "
            f"(--storage), and MLflow needs one of its own. Make it with: createdb mlflow"
        )


@dataclass(frozen=True)
class Plan:
    """Plan of a sweep: noise, privacy, time, memory and disk."""

    trials: int  # how many
    repeats: int  # runs that confirm the best of them
    at_once: int  # how many fit this machine
    noise: tuple[float, float]  # smallest and largest noise multiplier over the space
    steps: tuple[int, int]  # fewest and most steps of a trial
    delta: float  # failure probability
    trial_words: str  # privacy statement of one trial
    search_words: str  # privacy statement of the whole search
    seconds: float  # time the trials will take here, from probes of a few steps
    disk_bytes: int  # weights of all trials and resume state of the running ones, at most
    share: float  # share of random points of the space that meet the conditions of `where`
    # budgets that trials have in turn; one, or None where the noise is given
    epsilons: tuple[float | None, ...]
    stop_words: str  # what early stopping costs; empty without
    # what each way to spend one epsilon on the search would leave for the model that is released;
    # None where there is no one epsilon, or one run
    ways: Ways | None
    # correlated noise of the first trials that have it: bands, counted rounds, predicted error
    # beside independent noise's, and memory
    correlations: tuple[str, ...]


def make_plan(sweep: ResolvedSweep, at_once: int) -> Plan:
    """Calibrate the noise over the space, and time a few steps of some of its trials."""
    trials = sweep.config.budget.trials
    inside = [(config, plan_privacy(config)) for config in sweep.samples(_SAMPLES)]
    corners = [*zip(sweep.corners, sweep.plans, strict=True)]
    planned_trials = [pair for pair in corners if sweep.admits(pair[0])] + inside
    configs, budgets = ([*column] for column in zip(*planned_trials, strict=True))
    num = min(len(configs), max(_PROBES, min(at_once, _MOST_PROBES)))
    startup, probes = _run_probes(
        configs[-num:], budgets[-num:], sweep.config.resources.cpu, at_once
    )
    runs = [b.run for b in budgets]
    repeats = sweep.num_runs - trials
    earlier = sweep.config.learn_from if sweep.config.sampler.learns else None
    return Plan(
        trials=trials,
        repeats=repeats,
        at_once=at_once,
        noise=(min(r.noise_multiplier for r in runs), max(r.noise_multiplier for r in runs)),
        steps=(min(b.steps for b in budgets), max(b.steps for b in budgets)),
        delta=budgets[0].delta,
        trial_words=statement_of_trial(configs[0], budgets[0].epsilon, runs[0].noise_multiplier),
        search_words=search_statement(compute_search_privacy(sweep, [], ahead=sweep.num_runs))
        + (f" What sweep {earlier} spent adds to it." if earlier else ""),
        seconds=startup
        + mean(p.trial for p in probes) * (trials * _estimate_share_run(sweep) + repeats) / at_once,
        disk_bytes=estimate_disk_bytes(sweep, at_once),
        share=sweep.share(),
        epsilons=sweep.epsilons,
        stop_words=PRUNING_STATEMENT if sweep.config.pruner.name != "none" else "",
        ways=ways_of(sweep),
        correlations=tuple(
            dict.fromkeys(
                describe_correlation(config, budget)
                for config, budget in planned_trials
                if budget.correlation is not None
            )
        )[:_CORRELATIONS],
    )


def describe_correlation(config: TrialConfig, plan: PrivacyPlan) -> str:
    """Say what a trial's correlated noise may gain, and what it takes; before the first step."""
    found, run = plan.correlation, plan.run
    assert found is not None, "only correlated noise is described"
    kind = f"{found.num_kept} buffers" if found.decays else f"{found.cycle} bands"
    words = (
        f"{config.method.name}, batch size {config.train.batch_size}: {kind}, {run.steps} rounds "
        f"at rate {run.sampling_rate:.3g}"
    )
    if math.isfinite(plan.epsilon):
        error = predict_error(
            found, run.noise_multiplier, plan.epsilon, plan.delta, config.settings
        )
        words += (
            f"; predicted error {error.error:.3g} C/B, {error.ratio:.2f} times independent "
            f"noise's {error.independent:.3g}"
        )
    return f"{words}; noise history {format_bytes(history_bytes(config))}"


def ways_of(sweep: ResolvedSweep) -> Ways | None:
    """The ways to spend the sweep's epsilon; None where that is too little for one of them."""
    epsilon, budget = sweep.written.privacy.epsilon, sweep.config.budget
    if epsilon is None or len(sweep.epsilons) > 1 or budget.trials == 1:
        return None
    share = budget.explore.share if budget.explore else USUAL_SHARE
    try:
        return ways_to_spend(
            epsilon,
            sweep.written.delta,
            sweep.schedules,
            budget.trials,
            share,
            vary=sweep.schedules_vary,
        )
    except (InvalidKey, ArithmeticError, ConfigError):
        return None


@dataclass(frozen=True)
class Probe:
    """Time and memory of a trial, from a few of its steps."""

    entered: float  # when its process had started and imported everything, in seconds since 1970
    first: float  # seconds of what only a process's first trial does
    trial: float  # seconds of a whole trial of this config


def _run_probes(
    configs: list[TrialConfig], budgets: list[PrivacyPlan], threads: int, at_once: int
) -> tuple[float, list[Probe]]:
    """Seconds until a worker is ready, and the probes, as many at once as there will be trials."""
    start = time.time()
    workers = min(at_once, len(configs), _MOST_PROBES)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        probes = list(pool.map(_probe_trial, configs, budgets, [threads] * len(configs)))
    return min(p.entered for p in probes) - start + max(p.first for p in probes), probes


def _probe_trial(config: TrialConfig, plan: PrivacyPlan, threads: int) -> Probe:
    """Begin the trial, and time its parts; nothing trained is kept or shown.

    As a worker it is told its budget, and loads no accountant.
    """
    entered = time.time()
    torch.set_num_threads(config.train.threads or threads)
    keep_freed_memory()
    _, first = _measure_seconds(lambda: _begin_trial(config, plan))
    (step, progress), again = _measure_seconds(lambda: _begin_trial(config, plan))
    _, steps = _measure_seconds(partial(_take_step, step, progress))
    model, data = step.engine.model, step.data
    _, evaluation = _measure_seconds(lambda: evaluate(model, progress.params, data, step.dtype))
    reports = max(1, math.ceil(config.train.epochs / config.train.evaluate_every))
    return Probe(
        entered=entered,
        first=max(0.0, first - again),
        trial=again
        + step.plan.steps * steps / _PROBE_STEPS
        + reports * (evaluation + _REPORT_SECONDS),
    )


def _begin_trial(config: TrialConfig, plan: PrivacyPlan) -> tuple[Step, Progress]:
    """The trial after its first step, in which kernels are chosen."""
    step = assemble_step(config, Secret.draw(), torch.device("cpu"), plan)
    progress = step.start(initial_params(step))
    step(progress)
    return step, progress


def _take_step(step: Step, progress: Progress) -> None:
    for _ in range(_PROBE_STEPS):
        step(progress)


def _estimate_share_run(sweep: ResolvedSweep) -> float:
    """Share of all trials' steps that early stopping leaves, by rules of thumb.

    A median leaves most trials of a search that learns: a quarter of those after the random ones
    end soon after the warm-up. Successive halving leaves one in `reduction` at each rung.
    """
    pruner, epochs = sweep.config.pruner, sweep.reference_trial.train.epochs
    warm = min(1.0, pruner.warmup_epochs / epochs)
    if pruner.name == "median":
        trials = sweep.config.budget.trials
        later = max(0, trials - sweep.config.sampler.startup_trials) / trials
        return 1 - 0.25 * later * (1 - warm)
    share, alive, rung = 0.0, 1.0, 0.0
    while pruner.name == "successive_halving" and warm < 1:
        share += alive * (warm - rung)
        alive, rung, warm = alive / pruner.reduction, warm, min(1.0, warm * pruner.reduction)
    return share + alive * (1 - rung)


def _measure_seconds(what: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    found = what()
    return found, time.perf_counter() - start
