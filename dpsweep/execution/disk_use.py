"""Estimate of the disk space that a sweep takes, and the check that it is free."""

import os
from pathlib import Path

import torch

from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.disk import format_bytes, free_bytes
from dpsweep.core.errors import DiskFull
from dpsweep.methods import build_method
from dpsweep.models import build_model

_ENTRY_BYTES = 64 * 1024
"""A trial in study, spool and tracking, with some tens of reports."""

_EMPTY_BYTES = 2 * 1024**2
"""Study and tracking database before the first trial."""


def weight_bytes(config: TrialConfig) -> int:
    """Size of a trial's weights; nothing is computed or read."""
    with torch.device("meta"):
        model = build_model(config.model, config.data.spec, config.seed)
    size = getattr(torch, config.train.dtype).itemsize
    return sum(p.numel() for p in model.parameters()) * int(size)


def checkpoint_bytes(config: TrialConfig) -> int:
    """Size of a trial's resume state: iterates, filter, optimizer."""
    return _count_copies(config) * weight_bytes(config) + history_bytes(config)


def history_bytes(config: TrialConfig) -> int:
    """Size of a trial's noise history, in memory and in its resume state; 0 without correlation.

    A split query's release is twice as large.
    """
    with torch.device("meta"):
        model = build_model(config.model, config.data.spec, config.seed)
    trained = sum(p.numel() for p in model.parameters())
    return config.noise.count_kept(config.settings) * trained * torch.float64.itemsize


def estimate_disk_bytes(sweep: ResolvedSweep, at_once: int) -> int:
    """Bytes a sweep takes at most: every trial's weights, and the running ones' resume state.

    Each of these is there twice for the moment in which it is replaced.

    Args:
        sweep: The sweep; the largest corner of its space counts.
        at_once: Trials that run at a time.
    """
    largest = max(checkpoint_bytes(config) for config in _list_distinct_configs(sweep))
    weights = max(weight_bytes(config) for config in _list_distinct_configs(sweep))
    trials = sweep.config.budget.trials
    running = 2 * min(at_once, trials) * largest
    return running + trials * (weights + _ENTRY_BYTES) + _EMPTY_BYTES


def check_disk_space(sweep: ResolvedSweep, folder: Path, at_once: int | None = None) -> None:
    """Raise DiskFull if `folder` has not the trial_dir that the sweep will take.

    Args:
        folder: Where it will live; need not exist.
        at_once: Trials that run at a time; as many as this machine has CPUs for if None.
    """
    cores = (os.cpu_count() or 1) // sweep.config.resources.cpu
    needed = estimate_disk_bytes(sweep, max(1, cores) if at_once is None else at_once)
    free = free_bytes(folder)
    if free < needed:
        raise DiskFull(
            f"--state {folder}: the sweep takes up to {format_bytes(needed)} there "
            f"({sweep.config.budget.trials} trials), and {format_bytes(free)} are free. Name a "
            f"folder on another disk with --state FOLDER, free some space (dpsweep gc), or cut "
            f"budget.trials"
        )


def _list_distinct_configs(sweep: ResolvedSweep) -> list[TrialConfig]:
    """Corners of the space that differ in what is stored."""
    kinds = {
        (
            c.model.model_dump_json(),
            c.train.dtype,
            _count_copies(c),
            c.noise.count_kept(c.settings),
        ): c
        for c in sweep.corners
    }
    return list(kinds.values())


def _count_copies(config: TrialConfig) -> int:
    """Trees of the weights' size in a checkpoint, at most: iterates, filter, optimizer."""
    num_iterates = build_method(config.method).query.memory
    return 2 + num_iterates + 2 * (config.optimizer.name != "sgd")
