"""The verbs that measure what is not training: bench sigma, bench sweep."""

import json
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ray
from opacus.accountants.utils import get_noise_multiplier

from dpsweep.cli.say import console
from dpsweep.cluster.connect import cluster
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError, unknown
from dpsweep.data.datasets import SPECS
from dpsweep.execution.launch import new_session
from dpsweep.privacy.accounting import calibrate
from dpsweep.results.rich_table import plain_table
from dpsweep.store.state_dir import State

_BASE = """\
data: {name: digits}
model: {name: cnn_small, width: 4}
privacy: {epsilon: 4, delta: auto}
train: {batch_size: 64, epochs: 0.05, threads: 1}
optimizer: {lr: 1.0}
method: {name: disk}
"""

_SWEEP = """\
name: bench
base: base.yaml
search:
  optimizer.lr: {log_uniform: [0.3, 6]}
  method.kappa: {uniform: [0.3, 1.0]}
  method.gamma: {log_uniform: [0.2, 3]}
sampler: {name: tpe, startup_trials: 10}
"""
"""Trials of one step, so that all the time is what a search adds."""


def sigma(data: str, epsilon: float, batches: str, epochs: float, as_json: bool) -> None:
    """Times the calibration of the noise, ours and Opacus', at several batch sizes.

    Raises:
        ConfigError: If data set or batch sizes are not known.
    """
    if data not in SPECS:
        raise unknown("data set", data, SPECS, where="bench sigma: --data")
    num = SPECS[data].num_train
    sizes = _sizes(batches, num)
    delta = num**-1.1
    rows: list[dict[str, Any]] = []
    for batch in sizes:
        rate, steps = batch / num, max(1, round(epochs * num / batch))
        (run, _), seconds = _timed(partial(calibrate, epsilon, delta, rate, steps))
        row: dict[str, Any] = {"batch": batch, "steps": steps}
        row |= {"sigma": run.noise_multiplier, "seconds": seconds}
        for name in ("rdp", "prv"):
            asked = partial(_opacus, name, epsilon, delta, rate, steps)
            row[name], row[f"{name}_seconds"] = _timed(asked)
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = plain_table(f"Noise multiplier for epsilon {epsilon:g} on {data}, {epochs:g} epochs")
    for name in ("batch", "steps", "sigma", "s", "Opacus RDP", "s", "Opacus PRV", "s"):
        table.add_column(name, justify="right")
    for row in rows:
        shown = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        table.add_row(*shown)
    console().print(table)


def sweep(trials: int, at_once: int, as_json: bool) -> None:
    """Times trials of one step through study, Ray Tune and tracking, once Ray is up."""
    with tempfile.TemporaryDirectory(prefix="dpsweep-bench-") as folder, cluster(None):
        (Path(folder) / "base.yaml").write_text(_BASE)
        file = Path(folder) / "bench.yaml"
        file.write_text(_SWEEP)
        cores = int(ray.cluster_resources().get("CPU", 1))
        settings = [f"budget.trials={trials}", f"resources.cpu={max(1, cores // at_once)}"]
        made = load_sweep(file, settings)
        start = time.perf_counter()
        with new_session(made, State.at(str(Path(folder) / "state")), None) as session:
            session.run([])
            tracked = session.tracker.close()
            seconds = time.perf_counter() - start
            records = session.study.records()
            asked = [_timed(session.study.num_asked)[1] for _ in range(5)]
        inside = sum(record.row["seconds"] for record in records if record.row)
    told = {
        "trials": len(records),
        "seconds": seconds,
        "seconds_in_trials": inside,
        "per_trial": seconds / len(records),
        "tracked": tracked,
        "study_query_seconds": median(asked),
    }
    if as_json:
        print(json.dumps(told, indent=2))
        return
    console().print(
        f"{len(records)} trials of one step, {at_once} at a time: {seconds:.1f} s once Ray is up, "
        f"{told['per_trial']:.3f} s a trial, of which {inside / len(records):.3f} s in the trial; "
        f"results {'tracked' if tracked else 'NOT tracked'} in MLflow"
    )


def _sizes(batches: str, num: int) -> list[int]:
    parts = batches.split(",")
    if not all(part.strip().isdigit() and 0 < int(part) <= num for part in parts):
        raise ConfigError(
            f"bench sigma: --batch {batches!r} must be whole numbers from 1 to {num}, by commas, "
            f"such as 250,1000"
        )
    return [int(part) for part in parts]


def _opacus(accountant: str, epsilon: float, delta: float, rate: float, steps: int) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order lies at an end of its list
        found: float = get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
            accountant=accountant,
        )
    return found


def _timed(what: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    found = what()
    return found, time.perf_counter() - start
