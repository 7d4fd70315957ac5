"""The command line. Each verb calls one function of the module that is named beside it.

Those modules are imported when their verb runs, so that `dpsweep --help` is instant and
`dpsweep train` never loads Ray, Optuna or MLflow. It is the one place in the package with
imports inside functions.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dpsweep.core.errors import DpSweepError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Hyperparameter sweeps for training with differential privacy under a fixed epsilon.",
)

SweepFile = Annotated[Path, typer.Argument(help="A sweep file, such as sweeps/quickstart.yaml.")]
Name = Annotated[str, typer.Argument(help="Name of a launched sweep.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; repeatable."),
]
StateDir = Annotated[
    str | None,
    typer.Option("--state", metavar="FOLDER", help="State folder [default: ./.dpsweep]."),
]
Fetch = Annotated[bool, typer.Option("--download", help="Fetch missing data into data.root.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but errors.")]
Address = Annotated[
    str | None,
    typer.Option(help="Ray cluster: auto or HOST:PORT [default: an embedded one]."),
]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Database of the study, such as postgresql://USER@HOST/DB [default: DPSWEEP_STORAGE, "
        "or a file in the state folder]. Written down at launch: later verbs need it only if the "
        "database has moved.",
    ),
]
BestFile = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="Where the best config goes [default: best.yaml]."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def check(file: SweepFile, settings: Settings = None, fetch: Fetch = False) -> None:
    """Validate a sweep file or a trial config, its data and every corner of its space."""
    from dpsweep.cli import alone

    alone.check(file, settings or [], fetch)


@app.command()
def plan(file: SweepFile, settings: Settings = None, as_json: Json = False) -> None:
    """Print what a sweep will take: noise, epsilon of a trial and of the search, time, disk."""
    from dpsweep.cli import search

    search.plan(file, settings or [], as_json)


@app.command()
def launch(
    file: SweepFile,
    settings: Settings = None,
    name: Annotated[str | None, typer.Option(help="Name, instead of the file's.")] = None,
    unique: Annotated[
        bool, typer.Option("--unique", help="Append -2, -3, ... if the name is taken.")
    ] = False,
    learn_from: Annotated[
        str | None,
        typer.Option("--from", metavar="SWEEP", help="An earlier sweep to learn from."),
    ] = None,
    state: StateDir = None,
    address: Address = None,
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow server [default: a database in the state folder].")
    ] = None,
    storage: Storage = None,
    fetch: Fetch = False,
    out: BestFile = None,
    quiet: Quiet = False,
) -> None:
    """Run a sweep to its end: search, track, export the best config."""
    from dpsweep.cli import search

    if name:
        settings = [*(settings or []), f"name={name}"]
    if learn_from:
        settings = [*(settings or []), f"learn_from={learn_from}"]
    search.launch(
        file,
        settings or [],
        search.Options(state, address, tracking_uri, out, quiet, storage),
        fetch=fetch,
        unique=unique,
    )


@app.command()
def resume(
    name: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep's name, or its file.")],
    accept: Annotated[
        bool,
        typer.Option("--accept-changes", help="Take over what changed in the file, if harmless."),
    ] = False,
    state: StateDir = None,
    address: Address = None,
    storage: Storage = None,
    out: BestFile = None,
    quiet: Quiet = False,
) -> None:
    """Go on with a sweep that was stopped or whose driver died."""
    from dpsweep.cli import search

    options = search.Options(state, address, None, out, quiet, storage)
    search.resume(name, options, accept=accept)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="A sweep; all of them if missing.")] = None,
    state: StateDir = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show the sweeps of a state folder, or the trials of one."""
    from dpsweep.cli import look

    look.status(name, state, as_json, storage)


@app.command()
def stop(
    name: Name,
    state: StateDir = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 30.0,
) -> None:
    """End a running sweep in good order; `resume` goes on with it."""
    from dpsweep.cli import look

    look.stop(name, state, wait)


@app.command()
def best(
    name: Name,
    state: StateDir = None,
    storage: Storage = None,
    top: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    as_json: Json = False,
) -> None:
    """Show the best trials of a sweep, and what they promise."""
    from dpsweep.cli import look

    look.best(name, state, top, as_json, storage)


@app.command()
def export(
    name: Name,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the configs.")],
    state: StateDir = None,
    storage: Storage = None,
    top: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
) -> None:
    """Write the best configs as YAML files that `train` and `launch` read."""
    from dpsweep.cli import look

    look.export(name, state, top, out, storage)


@app.command()
def train(
    file: Annotated[Path, typer.Argument(help="A trial config, such as best.yaml.")],
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder of the run [default: runs/NAME].")
    ] = None,
    fetch: Fetch = False,
    quiet: Quiet = False,
) -> None:
    """Train one config alone, with fresh noise; no Ray, Optuna or MLflow."""
    from dpsweep.cli import alone

    alone.train(file, settings or [], out, fetch, quiet)


@app.command()
def ui(
    state: StateDir = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 5000,
) -> None:
    """Open the MLflow UI over a state folder's results."""
    from dpsweep.cli import look

    look.ui(state, host, port)


@app.command()
def gc(
    state: StateDir = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete what is listed.")] = False,
    as_json: Json = False,
) -> None:
    """List what killed processes left behind, with sizes; delete it with --remove."""
    from dpsweep.cli import tidy

    tidy.gc(state, remove, as_json)


@app.command()
def doctor(state: StateDir = None, storage: Storage = None, as_json: Json = False) -> None:
    """Check the installation, the state folder and every sweep in it; exit with 1 on a failure."""
    from dpsweep.cli import health

    health.doctor(state, storage, as_json)


@app.command()
def audit(
    what: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="A method, all, or a trial config: its method, clipping and base.",
        ),
    ] = "all",
    epsilon: Annotated[float, typer.Option(min=0.01, max=50, help="Claimed epsilon.")] = 4.0,
    delta: Annotated[float, typer.Option(min=1e-12, max=0.5, help="Claimed delta.")] = 1e-5,
    sampling_rate: Annotated[
        float, typer.Option("--sampling-rate", min=0.001, max=1, help="q; tightest at 1.")
    ] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 2,
    runs: Annotated[int, typer.Option(min=20, help="Runs with the canary, and without.")] = 5000,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999999, help="Of the bounds, all together.")
    ] = 0.99,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Measure a lower bound on a method's epsilon; exit with 1 if it exceeds the claim."""
    from dpsweep.cli import measure

    plan = {
        "epsilon": epsilon,
        "delta": delta,
        "sampling_rate": sampling_rate,
        "steps": steps,
        "runs": runs,
        "confidence": confidence,
    }
    measure.audit(what, settings or [], plan, as_json)


@app.command()
def space(
    method: Annotated[str, typer.Argument(help="A method, such as fftkf.")],
) -> None:
    """Print a method's default search space, ready to paste into a sweep file."""
    from dpsweep.cli import alone

    alone.space(method)


@app.command()
def models(
    data: Annotated[str, typer.Option(help="Whose shape the images have.")] = "cifar10",
    as_json: Json = False,
) -> None:
    """List the models, with the number of their weights."""
    from dpsweep.cli import catalogue

    catalogue.models(data, as_json)


@app.command()
def data(
    place: Annotated[Path, typer.Argument(help="A folder of images by class, or an .npz file.")],
) -> None:
    """Print the data section of a trial for images of your own, ready to paste."""
    from dpsweep.cli import catalogue

    catalogue.data(place)


@app.command()
def schema(
    kind: Annotated[str, typer.Argument(help="sweep or trial.")] = "sweep",
) -> None:
    """Print the JSON schema of a sweep file or a trial config, for editors."""
    from dpsweep.cli import alone

    alone.schema(kind)


bench = typer.Typer(no_args_is_help=True, help="Measure speed, side by side in one run.")
app.add_typer(bench, name="bench")


@bench.command("step")
def bench_step(
    model: Annotated[str, typer.Option(help="A model of `dpsweep schema trial`.")] = "cnn5",
    data: Annotated[str, typer.Option(help="Whose shape the images have.")] = "cifar10",
    batch: Annotated[int, typer.Option(min=2, help="Batch size.")] = 256,
    methods: Annotated[
        str,
        typer.Option(
            "--method",
            help="Ours, by commas; NAME:KEY=VALUE sets a key, as innerouter:points=3; NAME@ENGINE, "
            "NAME@fixed.",
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
    from dpsweep.cli import speed
    from dpsweep.train.race import Race

    names = [*against.split(","), *methods.split(",")]
    names = [f"{methods.split(',')[0]}@vmap" if name == "vmap" else name for name in names if name]
    race = Race(data, {"name": model}, batch, device, physical or "auto", tuple(settings or ()))
    options = {"repeats": repeats, "threads": threads, "memory": memory, "as_json": as_json}
    speed.step(race, list(dict.fromkeys(names)), options)


@bench.command("sigma")
def bench_sigma(
    data: Annotated[str, typer.Option(help="Whose number of examples counts.")] = "cifar10",
    epsilon: Annotated[float, typer.Option(min=0.01, max=50, help="The budget.")] = 4.0,
    batches: Annotated[str, typer.Option("--batch", help="By commas.")] = "250,1000,4000",
    epochs: Annotated[float, typer.Option(min=0.01, help="Length of a run.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Time the calibration of the noise, ours and Opacus'."""
    from dpsweep.cli import overhead

    overhead.sigma(data, epsilon, batches, epochs, as_json)


@bench.command("sweep")
def bench_sweep(
    trials: Annotated[int, typer.Option(min=1, help="Trials of one step.")] = 50,
    at_once: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 2,
    as_json: Json = False,
) -> None:
    """Time what a search adds to its trials: study, Ray Tune and tracking."""
    from dpsweep.cli import overhead

    overhead.sweep(trials, at_once, as_json)


def main() -> None:
    """Runs the command line; a user's mistake is one message on stderr, and exit code 2."""
    try:
        app()
    except DpSweepError as e:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"error: {e}")
        sys.exit(2)
