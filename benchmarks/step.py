"""Time one step of training side by side: ours, plain SGD's and Opacus'.

python benchmarks/step.py --help
"""

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import Annotated

import torch
import typer
from command import run
from race import (
    Race,
    Take,
    compute_ratios,
    count_step_operations,
    make_runner,
    measure_medians,
    measure_peak_bytes,
)
from rich.table import Table

from dpsweep.cli.options import Json, Settings
from dpsweep.cli.say import console
from dpsweep.results.rich_table import plain_table
from dpsweep.training.device import open_device
from dpsweep.training.malloc import keep_freed_memory
from dpsweep.training.step import REGIONS

_PROFILED = 3


@dataclass(frozen=True)
class Row:
    """One runner of a race.

    Attributes:
        runner: Its name.
        milliseconds: Median step.
        fastest: Its fastest step, in milliseconds.
        slowest: Its slowest step, in milliseconds.
        ratio: Median over the first runner's.
        per_second: Examples a second, by the median.
        gflops: Arithmetic of a plain step, in 10^9 operations a second, by the median.
        peak_mb: Peak memory of a step, in MB; None if not asked.
        parts: Share of the step by its parts; None for those that are not ours.
    """

    runner: str
    milliseconds: float
    fastest: float
    slowest: float
    ratio: float
    per_second: float
    gflops: float
    peak_mb: float | None
    parts: dict[str, float] | None


def step(
    model: Annotated[str, typer.Option(help="A model of `dpsweep schema trial`.")] = "cnn5",
    data: Annotated[str, typer.Option(help="Whose shape the images have.")] = "cifar10",
    batch: Annotated[int, typer.Option(min=2, help="Batch size.")] = 256,
    methods: Annotated[
        str,
        typer.Option(
            "--method",
            help="Ours, by commas; NAME:KEY=VALUE sets a key, as innerouter:points=3; NAME@ENGINE, "
            "NAME@fixed, NAME@secure.",
        ),
    ] = "dp_sgd",
    against: Annotated[
        str, typer.Option(help="sgd, sgd-channels-last, opacus, opacus-ghost, vmap; by commas.")
    ] = "sgd,opacus,opacus-ghost,vmap",
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each.")] = 7,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    physical: Annotated[int | None, typer.Option(min=1, help="Our max_physical_batch.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Peak memory, in new processes.")
    ] = False,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Time one step of training: ours against plain SGD and Opacus."""
    names = [*against.split(","), *methods.split(",")]
    names = [f"{methods.split(',')[0]}@vmap" if name == "vmap" else name for name in names if name]
    names = list(dict.fromkeys(names))
    race = Race(data, {"name": model}, batch, device, physical or "auto", tuple(settings or ()))
    open_device(device, key="--device")
    if threads:
        torch.set_num_threads(threads)
    keep_freed_memory()  # for all of them, as in a trial
    takes = {name: make_runner(race, name) for name in names}
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    operations = count_step_operations(race)
    seconds = measure_medians(takes, repeats, wait)
    units = compute_ratios(seconds, names[0])
    rows = []
    for name, times in seconds.items():
        one = median(times)
        rows.append(
            Row(
                runner=name,
                milliseconds=1e3 * one,
                fastest=1e3 * min(times),
                slowest=1e3 * max(times),
                ratio=units[name],
                per_second=batch / one,
                gflops=operations / one / 1e9,
                peak_mb=measure_peak_bytes(race, name) / 1e6 if memory else None,
                parts=_parts(takes[name], device),
            )
        )
    if as_json:
        told = {"machine": machine(device), "race": asdict(race)}
        print(json.dumps({**told, "rows": [asdict(row) for row in rows]}, indent=2))
        return
    console().print(_table(race, rows))
    for row in rows:
        if row.parts:
            shares = ", ".join(f"{k} {v:.1%}" for k, v in row.parts.items())
            console().print(f"{row.runner}: {shares}", highlight=False)
    console().print(", ".join(f"{k} {v}" for k, v in machine(device).items()))


def machine(device: str) -> dict[str, str]:
    """Describe the machine of a measurement."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": version("torch"),
        "opacus": version("opacus"),
    }


def _parts(take: Take, device: str) -> dict[str, float] | None:
    """Share of a step's time that each of its parts takes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_PROFILED):
            take()
    totals = {event.key: event for event in profile.key_averages()}
    times = {part: totals.get(f"step/{part}") for part in REGIONS}
    spent = {
        k: e.device_time_total if device == "cuda" else e.cpu_time_total
        for k, e in times.items()
        if e is not None
    }
    whole = sum(spent.values())
    return {k: v / whole for k, v in spent.items()} if whole else None


def _table(race: Race, rows: list[Row]) -> Table:
    title = f"One step of {race.model['name']}, {race.data}, B = {race.batch_size}"
    table = plain_table(title)
    table.add_column("runner")
    for column in ("ms", "fastest", "slowest", f"of {rows[0].runner}", "examples/s", "GFLOP/s"):
        table.add_column(column, justify="right")
    if rows[0].peak_mb is not None:
        table.add_column("peak MB", justify="right")
    for row in rows:
        cells = [
            row.runner,
            f"{row.milliseconds:.1f}",
            f"{row.fastest:.1f}",
            f"{row.slowest:.1f}",
            f"{row.ratio:.2f}",
            f"{row.per_second:.0f}",
            f"{row.gflops:.0f}",
        ]
        table.add_row(*cells, *([] if row.peak_mb is None else [f"{row.peak_mb:.0f}"]))
    return table


if __name__ == "__main__":
    run(step)
