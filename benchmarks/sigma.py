"""Time the calibration of the noise, ours and Opacus': python benchmarks/sigma.py --help."""

import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer
from command import run
from opacus.accountants.utils import get_noise_multiplier

from dpsweep.cli.options import Json
from dpsweep.cli.say import console
from dpsweep.core.errors import ConfigError, unknown_name_error
from dpsweep.data.datasets import SPECS
from dpsweep.privacy.accounting import calibrate_noise
from dpsweep.results.rich_table import plain_table


def sigma(
    data: Annotated[str, typer.Option(help="Whose number of examples counts.")] = "cifar10",
    epsilon: Annotated[float, typer.Option(min=0.01, max=50, help="The budget.")] = 4.0,
    batches: Annotated[str, typer.Option("--batch", help="By commas.")] = "250,1000,4000",
    epochs: Annotated[float, typer.Option(min=0.01, help="Length of a run.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Time the calibration of the noise, ours and Opacus'."""
    if data not in SPECS:
        raise unknown_name_error("data set", data, SPECS, where="--data")
    num = SPECS[data].num_train
    sizes = _sizes(batches, num)
    delta = num**-1.1
    rows: list[dict[str, Any]] = []
    for batch in sizes:
        rate, steps = batch / num, max(1, round(epochs * num / batch))
        (run, _), seconds = _timed(partial(calibrate_noise, epsilon, delta, rate, steps))
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


def _sizes(batches: str, num: int) -> list[int]:
    parts = batches.split(",")
    if not all(part.strip().isdigit() and 0 < int(part) <= num for part in parts):
        raise ConfigError(
            f"--batch {batches!r} must be whole numbers from 1 to {num}, by commas, "
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


if __name__ == "__main__":
    run(sigma)
