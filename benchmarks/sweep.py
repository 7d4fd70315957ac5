"""Time what a search adds to its trials: python benchmarks/sweep.py --help."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from command import run

from dpsweep.cli.options import Json
from dpsweep.cli.say import console
from dpsweep.cluster.connect import cluster
from dpsweep.config.sweep import load_sweep
from dpsweep.execution.launch import create_session
from dpsweep.store.state_dir import StateFolder

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


def sweep(
    trials: Annotated[int, typer.Option(min=1, help="Trials of one step.")] = 50,
    at_once: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 2,
    as_json: Json = False,
) -> None:
    """Time what a search adds to its trials: study, Ray Tune and tracking, once Ray is up."""
    import ray  # after dpsweep, which sets what Ray reads of the environment when it is imported

    with tempfile.TemporaryDirectory(prefix="dpsweep-bench-") as folder, cluster(None):
        (Path(folder) / "base.yaml").write_text(_BASE)
        file = Path(folder) / "bench.yaml"
        file.write_text(_SWEEP)
        cores = int(ray.cluster_resources().get("CPU", 1))
        settings = [f"budget.trials={trials}", f"resources.cpu={max(1, cores // at_once)}"]
        made = load_sweep(file, settings)
        start, cpu = time.perf_counter(), time.process_time()
        with create_session(made, StateFolder.at(str(Path(folder) / "state")), None) as session:
            session.run([])
            tracked = session.tracker.close()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            records = session.study.records()
            asked = [_seconds(session.study.num_asked) for _ in range(5)]
        inside = sum(record.row["seconds"] for record in records if record.row)
    told = {
        "trials": len(records),
        "seconds": seconds,
        "seconds_in_trials": inside,
        "driver_cpu_seconds": cpu,
        "per_trial": seconds / len(records),
        "tracked": tracked,
        "study_query_seconds": median(asked),
    }
    if as_json:
        print(json.dumps(told, indent=2))
        return
    console().print(
        f"{len(records)} trials of one step, {at_once} at a time: {seconds:.1f} s once Ray is up, "
        f"{told['per_trial']:.3f} s a trial, of which {inside / len(records):.3f} s in the trial "
        f"({cpu:.1f} s of CPU time of this process); "
        f"results {'tracked' if tracked else 'NOT tracked'} in MLflow"
    )


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    run(sweep)
