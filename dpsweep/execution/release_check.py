"""The checks of what a sweep's step releases, once before its first trial, where trials run."""

import logging

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dpsweep.config.resources import ResourcesConfig
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.disk import write_atomically
from dpsweep.core.errors import ConfigError, DpSweepError, InvalidKey, StateError, summarize_error
from dpsweep.core.threads import torch_threads
from dpsweep.execution.resources import count_trials_per_node, select_cards
from dpsweep.execution.tracking import CHECKS
from dpsweep.store.state_dir import SweepFolder
from dpsweep.training.release_check import Check, check_releases, table_of_checks

_SECONDS = 0.3
_TIMEOUT_SECONDS = 300.0
_UNCHECKED = "NOT CHECKED"

log = logging.getLogger(__name__)


def is_checked(folder: SweepFolder) -> bool:
    """Return whether the sweep's checks have run; their failures are never stored."""
    found = folder.path / CHECKS
    return found.exists() and _UNCHECKED not in found.read_text()


def store_release_checks(sweep: ResolvedSweep, folder: SweepFolder) -> None:
    """Check the releases of the sweep's reference trial, and write down what was found.

    Raises:
        ConfigError: If a check fails: the trials would not keep what the statement says.
        StateError: If the step fails, as for a model that mixes examples. Where no worker is there
            in five minutes, that is stored, and the sweep goes on.
    """
    config = sweep.reference_trial
    try:
        found, where = _check_in_place(config, sweep)
    except (DpSweepError, ValueError, RayError, RuntimeError, MemoryError) as e:
        cause = e.cause if isinstance(e, RayTaskError) else e
        if not isinstance(cause, RayError):
            key = f"{cause.key}: " if isinstance(cause, InvalidKey) else ""
            known = isinstance(cause, DpSweepError | InvalidKey)
            reason = str(cause).rstrip(".") if known else summarize_error(cause)
            raise StateError(
                f"{key}{reason}. Every trial would fail so, and none has begun. "
                f"Mend that, and go on with: dpsweep resume {folder.called}"
            ) from e
        # No worker came, or it was lost: no fault of the step. The next launch checks again.
        text = f"{_UNCHECKED}: no worker ran the step of one trial ({summarize_error(cause)})"
        found, where = [], "no node"
    else:
        text = table_of_checks(found)
    head = "# Checks of what one step releases\n\nOn random inputs, before the first trial: "
    head += f"method {config.method.name}, model {config.model.name}, "
    head += f"clip norm {config.privacy.clip_norm:g}, engine {config.train.engine}, "
    head += f"dtype {config.train.dtype}, on {where}.\n\n"
    if bad := [check for check in found if not check.holds]:  # checked again by the next launch
        raise ConfigError(
            f"sweep {sweep.name!r}: its step does not release what the privacy statement says: "
            + "; ".join(f"{c.name} {c.measured:.4g} > {c.allowed:.4g} {c.unit}" for c in bad)
            + ". See it with: dpsweep audit FILE. This is a fault of the model, of an installed "
            "package or of dpsweep; please report it"
        )
    write_atomically(folder.path / CHECKS, f"{head}{text}\n".encode())


def _check_in_place(config: TrialConfig, sweep: ResolvedSweep) -> tuple[list[Check], str]:
    """Run the checks in this process, or where a trial would run if that is another place.

    That is another node, whose processor and packages may differ; and on any node a worker, where
    the model is the user's code or needs a GPU. If the step fails there it runs on one more node:
    a bad node is no reason to stop a sweep, whose trials will avoid it.
    """
    resources = sweep.config.resources
    nodes = _list_nodes(resources)
    here = ray.get_runtime_context().get_node_id() if nodes else None
    if (not nodes or nodes == [here]) and config.model.name != "own" and not resources.num_gpus:
        # as many threads as a worker has: sums depend on them, and more would wait for each other
        with torch_threads(config.train.threads or resources.cpu):
            return check_releases(config, _SECONDS), "this machine"
    try:
        return _check_on(next(iter(nodes), None), config, resources)
    except RayTaskError as e:
        if len(nodes) < 2:
            raise
        try:
            found = _check_on(nodes[1], config, resources)
        except RayError:
            raise e from None  # it is the step, or nobody can tell
        log.warning(
            "the checks of the step failed on node %s, and ran on another: %s",
            *(nodes[0][:8], summarize_error(e.cause)),
        )
        return found


def _check_on(
    node: str | None, config: TrialConfig, resources: ResourcesConfig
) -> tuple[list[Check], str]:
    """Run the checks in a worker on a node; on any if None, or if that one is full or gone."""
    task = ray.remote(
        num_cpus=resources.cpu,
        num_gpus=resources.num_gpus,
        resources=select_cards(resources),
        max_retries=0,
    )(_check)
    if node is not None:
        task = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True))
    waiting = task.remote(config, resources.num_devices)
    try:
        found: tuple[list[Check], str] = ray.get(waiting, timeout=_TIMEOUT_SECONDS)
    except GetTimeoutError:
        ray.cancel(waiting, force=True)
        raise
    return found


def _check(config: TrialConfig, num_devices: int) -> tuple[list[Check], str]:
    """Run the checks in a worker, and say on which node."""
    node = ray.get_runtime_context().get_node_id()
    return check_releases(config, _SECONDS, num_devices), f"node {node[:8]}"


def _list_nodes(resources: ResourcesConfig) -> list[str]:
    """List the ids of the nodes where a trial fits, this process' own last; none without Ray."""
    if not ray.is_initialized():
        return []
    here = ray.get_runtime_context().get_node_id()
    fit = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and count_trials_per_node(resources, node["Resources"])
    ]
    return sorted(fit, key=lambda node: node == here)
