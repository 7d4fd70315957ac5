"""The verbs under `dpsweep bench`; what they run is imported late, as for the others."""

from typing import Annotated

import typer

from dpsweep.cli.options import Json, Settings

app = typer.Typer(no_args_is_help=True, help="Measure speed, side by side in one run.")


@app.command()
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
    from dpsweep.cli.verbs import bench_step
    from dpsweep.training.race import Race

    names = [*against.split(","), *methods.split(",")]
    names = [f"{methods.split(',')[0]}@vmap" if name == "vmap" else name for name in names if name]
    race = Race(data, {"name": model}, batch, device, physical or "auto", tuple(settings or ()))
    options = {"repeats": repeats, "threads": threads, "memory": memory, "as_json": as_json}
    bench_step.step(race, list(dict.fromkeys(names)), options)


@app.command()
def sigma(
    data: Annotated[str, typer.Option(help="Whose number of examples counts.")] = "cifar10",
    epsilon: Annotated[float, typer.Option(min=0.01, max=50, help="The budget.")] = 4.0,
    batches: Annotated[str, typer.Option("--batch", help="By commas.")] = "250,1000,4000",
    epochs: Annotated[float, typer.Option(min=0.01, help="Length of a run.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Time the calibration of the noise, ours and Opacus'."""
    from dpsweep.cli.verbs import bench_search

    bench_search.sigma(data, epsilon, batches, epochs, as_json)


@app.command()
def sweep(
    trials: Annotated[int, typer.Option(min=1, help="Trials of one step.")] = 50,
    at_once: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 2,
    as_json: Json = False,
) -> None:
    """Time what a search adds to its trials: study, Ray Tune and tracking."""
    from dpsweep.cli.verbs import bench_search

    bench_search.sweep(trials, at_once, as_json)
