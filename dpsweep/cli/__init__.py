"""The command line. Each verb calls one function of the module that is named beside it.

Those modules are imported when their verb runs, so that `dpsweep --help` is instant and
`dpsweep train` never loads Ray, Optuna or MLflow. Elsewhere only optional or slow packages are
imported so.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dpsweep.cli.options import (
    Address,
    AddressHereOrAway,
    BestFile,
    Fetch,
    Force,
    Json,
    Name,
    Quiet,
    Settings,
    StateDir,
    Storage,
    SweepFile,
    format_options,
)
from dpsweep.cli.say import error, spell_out_letters
from dpsweep.core import __version__
from dpsweep.core.errors import ConfigError, DpSweepError, PrivateRowError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else what stands in brackets, as our defaults do, is not shown
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dpsweep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hyperparameter sweeps for training with differential privacy under a fixed epsilon."""


def _example_names() -> list[str]:
    """For shell completion."""
    from dpsweep.app.starter import examples

    return list(examples())


@app.command()
def init(
    data: Annotated[
        str | None,
        Option(
            metavar="DATA",
            help="digits, folder:PATH (images by class), npz:PATH (arrays), table:FILE or "
            "text:FILE (rows) [default: digits].",
        ),
    ] = None,
    method: Annotated[
        str | None, Option(metavar="METHOD", help="Training method [default: dp_sgd].")
    ] = None,
    example: Annotated[
        str | None,
        Option(
            "--from",
            metavar="EXAMPLE",
            help="Copy a packaged example instead.",
            autocompletion=_example_names,
        ),
    ] = None,
    listing: Annotated[bool, Option("--list", help="List the examples.")] = False,
    name: Annotated[
        str | None, Option(help="Name of the sweep [default: DATA-METHOD, or EXAMPLE].")
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            "-o", "--out", help="The sweep file; its base is put beside it [default: NAME.yaml]."
        ),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a commented sweep and its base, to change and launch."""
    from dpsweep.cli.verbs import init

    if listing:
        init.list_examples()
        return
    init.init(data, method, example, name, out, force=force)


@app.command()
def check(
    file: SweepFile,
    settings: Settings = None,
    fetch: Fetch = False,
    deep: Annotated[
        bool, Option("--deep", help="Run the step, and check what it releases.")
    ] = False,
) -> None:
    """Validate a sweep file or a trial config, its data and every corner of its space."""
    from dpsweep.cli.verbs import trial

    trial.check(file, settings or [], fetch, deep)


@app.command()
def plan(file: SweepFile, settings: Settings = None, as_json: Json = False) -> None:
    """Print what a sweep will take: noise, epsilon of a trial and of the search, time, disk."""
    from dpsweep.cli.verbs import plan

    plan.plan(file, settings or [], as_json)


@app.command()
def launch(
    file: SweepFile,
    settings: Settings = None,
    name: Annotated[str | None, Option(help="Name, instead of the file's.")] = None,
    unique: Annotated[
        bool, Option("--unique", help="Append -2, -3, ... if the name is taken.")
    ] = False,
    learn_from: Annotated[
        str | None, Option("--from", metavar="SWEEP", help="An earlier sweep to learn from.")
    ] = None,
    state: StateDir = None,
    address: AddressHereOrAway = None,
    tracking_uri: Annotated[
        str | None, Option(help="MLflow server [default: a database in the state folder].")
    ] = None,
    storage: Storage = None,
    fetch: Fetch = False,
    out: BestFile = None,
    quiet: Quiet = False,
) -> None:
    """Run a sweep to its end: search, track, export the best config."""
    from dpsweep.cli.verbs import route, run

    if name:
        settings = [*(settings or []), f"name={name}"]
    if learn_from:
        settings = [*(settings or []), f"learn_from={learn_from}"]
    options = run.Options(state, address, tracking_uri, out, quiet, storage)
    away = address and address.startswith("ray://")
    begin = route.launch_through_client if away else run.launch
    begin(file, settings or [], options, fetch=fetch, unique=unique)


@app.command()
def submit(
    file: SweepFile,
    to: Annotated[
        str | None,
        Option(
            metavar="ADDRESS",
            help="The cluster: http://HEAD:8265 or ray://HEAD:10001 [default: DPSWEEP_TO].",
        ),
    ] = None,
    settings: Settings = None,
    name: Annotated[str | None, Option(help="Name, instead of the file's.")] = None,
    state: Annotated[
        str | None,
        Option(
            metavar="FOLDER",
            help="State folder on the cluster, absolute, seen by every node [default: its "
            "DPSWEEP_STATE].",
        ),
    ] = None,
    tracking_uri: Annotated[
        str | None, Option(help="MLflow server [default: MLFLOW_TRACKING_URI there].")
    ] = None,
    storage: Annotated[
        str | None,
        Option(metavar="URL", help="Database of the study [default: DPSWEEP_STORAGE there]."),
    ] = None,
    project: Annotated[
        Path | None,
        Option(help="Folder of your code to send [default: the current one, if a model needs it]."),
    ] = None,
    detach: Annotated[bool, Option("--detach", help="Do not follow it.")] = False,
) -> None:
    """Send a sweep to a Ray cluster as a job, and follow it; it goes on without this machine."""
    from dpsweep.cli.verbs import route

    remote = route.import_remote("submit")
    settings = [*(settings or []), *([f"name={name}"] if name else [])]
    remote.submit(
        file,
        settings,
        to,
        state=state,
        tracking_uri=tracking_uri,
        storage=storage,
        project=project,
        detach=detach,
    )


@app.command()
def logs(
    name: Name,
    follow: Annotated[bool, Option("-f", "--follow", help="Until the job ends.")] = False,
    state: StateDir = None,
) -> None:
    """Print what the job of a submitted sweep says."""
    from dpsweep.cli.verbs import route

    route.import_remote("logs").logs(name, state, following=follow)


@app.command()
def up(
    local: Annotated[bool, Option("--local", help="On this machine.")] = False,
    nodes: Annotated[int, Option(min=1, max=64, help="Ray nodes.")] = 3,
    cpus: Annotated[
        int | None, Option(min=1, help="CPUs of a node [default: this machine's, shared].")
    ] = None,
    tracking: Annotated[
        bool, Option("--tracking", help="MLflow on PostgreSQL and an S3 store, too.")
    ] = False,
    state: StateDir = None,
) -> None:
    """Start a Ray cluster of several nodes on this machine, to try the service."""
    from dpsweep.cli.verbs import local_cluster

    local_cluster.check_local(local)
    local_cluster.up(state, nodes=nodes, cpus=cpus, tracking=tracking)


@app.command()
def down(
    remove: Annotated[bool, Option("--remove", help="Delete its files, too.")] = False,
    state: StateDir = None,
) -> None:
    """End exactly what `up` started."""
    from dpsweep.cli.verbs import local_cluster

    local_cluster.down(state, remove=remove)


@app.command()
def resume(
    name: Annotated[str, Argument(metavar="SWEEP", help="A sweep's name, or its file.")],
    accept: Annotated[
        bool, Option("--accept-changes", help="Take over what changed in the file, if harmless.")
    ] = False,
    trials: Annotated[
        int | None, Option(min=1, metavar="N", help="Trials in all, to go on with more.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change what does no harm: budget, confirm, resources, keep_weights; repeatable.",
        ),
    ] = None,
    state: StateDir = None,
    address: Annotated[
        str | None,
        Option(
            help="Ray cluster: auto or HOST:PORT [default: an embedded one]. Of a submitted sweep: "
            "http://HEAD:8265 or ray://HEAD:10001, where that cluster is now."
        ),
    ] = None,
    storage: Storage = None,
    out: BestFile = None,
    quiet: Quiet = False,
    wait: Annotated[
        float, Option(min=0, help="Seconds to wait for another driver to end or to be lost.")
    ] = 0.0,
    force: Force = False,
) -> None:
    """Go on with a sweep that was stopped or whose driver died."""
    from dpsweep.cli.verbs import route, run

    settings = [*(settings or []), *([f"budget.trials={trials}"] if trials else [])]
    name, file = run.load_named(name, settings)
    words = format_options({"accept": accept, "force": force, "wait": wait or None})
    words += [] if file else [word for setting in settings for word in ("--set", setting)]
    if route.resume_on_cluster(
        name, file, state, address, storage, out=out, quiet=quiet, words=words
    ):
        return
    options = run.Options(state, address, None, out, quiet, storage, force, wait)
    run.resume(name, file, options, settings=settings, accept=accept)


@app.command()
def status(
    name: Annotated[str | None, Argument(help="A sweep; all of them if missing.")] = None,
    state: StateDir = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Show everyone's sweeps of a state folder, or the trials of one."""
    from dpsweep.cli.verbs import route, sweeps

    if route.ask_cluster("status", name, state, as_json=as_json):
        return
    sweeps.status(name, state, as_json, storage)
    if name is None and not as_json:
        route.tell_submitted(state)


@app.command()
def stop(
    name: Name,
    state: StateDir = None,
    wait: Annotated[float, Option(help="Seconds to wait for its end.")] = 30.0,
    force: Force = False,
) -> None:
    """End a running sweep in good order; `resume` goes on with it."""
    from dpsweep.cli.verbs import route, sweeps

    if route.ask_cluster("stop", name, state, wait=wait, force=force):
        return
    sweeps.stop(name, state, wait, force=force)


@app.command()
def best(
    name: Name,
    state: StateDir = None,
    storage: Storage = None,
    top: Annotated[int, Option(min=1, help="How many.")] = 5,
    as_json: Json = False,
) -> None:
    """Show the best trials of a sweep, and their privacy."""
    from dpsweep.cli.verbs import route, sweeps

    if route.ask_cluster("best", name, state, top=top, as_json=as_json):
        return
    sweeps.best(name, state, top, as_json, storage)


@app.command()
def export(
    name: Name,
    out: Annotated[Path | None, Option("-o", "--out", help="Folder for the files.")] = None,
    state: StateDir = None,
    storage: Storage = None,
    top: Annotated[int, Option(min=1, help="How many.")] = 1,
    kind: Annotated[
        str,
        Option(
            "--format",
            help="yaml: configs that `train` reads, and a sweep takes as its base; opacus: a "
            "training script without dpsweep; torch: the weights, and a script that uses them; "
            "huggingface: a language model for transformers and peft, with a card.",
        ),
    ] = "yaml",
    register: Annotated[
        str | None,
        Option(
            metavar="MODEL", help="Register the best model under this name, where it is tracked."
        ),
    ] = None,
    alias: Annotated[str, Option(help="Of the registered version.")] = "champion",
    allow_void: Annotated[
        bool, Option("--allow-void", help="Register a sweep with a test secret, as void.")
    ] = False,
) -> None:
    """Write the best of a sweep as files, or register its best model in MLflow."""
    from dpsweep.cli.verbs import export, route

    plain = kind == "yaml" and not register
    if out and plain and route.export_from_cluster(name, state, top, out):
        return
    if not plain:
        way = "--register" if register else f"--format {kind}"
        route.refuse_elsewhere(f"export {way}", name, state)
    export.export(
        name,
        state,
        storage,
        out=out,
        kind=kind,
        top=top,
        register=register,
        alias=alias,
        allow_void=allow_void,
    )


@app.command()
def report(
    name: Name,
    out: Annotated[
        Path | None, Option("-o", "--out", help="The page [default: report-SWEEP.html].")
    ] = None,
    pictures: Annotated[
        Path | None,
        Option("--png", metavar="FOLDER", help="Also each figure as a PNG, into a folder."),
    ] = None,
    state: StateDir = None,
    storage: Storage = None,
) -> None:
    """Write a sweep as one page to read anywhere: privacy, best config, tables, figures."""
    from dpsweep.cli.verbs import report, route

    route.refuse_elsewhere("report", name, state)
    report.report(name, out, pictures, state, storage)


@app.command()
def watch(
    name: Annotated[
        str | None, Argument(help="A running sweep; the one that runs if missing.")
    ] = None,
    web: Annotated[
        bool, Option("--web", help="Serve the report, live, to a browser on this machine.")
    ] = False,
    port: Annotated[
        int, Option(min=0, max=65535, help="Of --web [default: any that is free].")
    ] = 0,
    state: StateDir = None,
    storage: Storage = None,
) -> None:
    """Follow a running sweep from another terminal until it ends; Ctrl-C leaves it running."""
    from dpsweep.cli.verbs import route, watch

    route.refuse_elsewhere("watch", name, state)
    watch.watch(name, state, storage, port if web else None)


@app.command()
def train(
    file: Annotated[Path, Argument(help="A trial config, such as best.yaml.")],
    settings: Settings = None,
    out: Annotated[
        Path | None, Option("-o", "--out", help="Folder of the run [default: runs/NAME].")
    ] = None,
    fetch: Fetch = False,
    quiet: Quiet = False,
) -> None:
    """Train one config alone, with fresh noise; no Ray, Optuna or MLflow."""
    from dpsweep.cli.verbs import trial

    trial.train(file, settings or [], out, fetch, quiet)


@app.command()
def ui(
    state: StateDir = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 5000,
    no_browser: Annotated[
        bool, Option("--no-browser", help="Print the address, and open nothing.")
    ] = False,
) -> None:
    """Open the MLflow UI over a state folder's results, at its newest sweep."""
    from dpsweep.cli.verbs import sweeps

    sweeps.ui(state, host, port, browse=not no_browser)


@app.command()
def gc(
    name: Annotated[str | None, Argument(help="A sweep; all of yours if missing.")] = None,
    state: StateDir = None,
    remove: Annotated[bool, Option("--remove", help="Delete what is listed.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """List what killed processes left behind, with sizes; delete it with --remove."""
    from dpsweep.cli.verbs import gc, route

    route.refuse_elsewhere("gc", name, state)
    gc.gc(state, remove, as_json, name=name, force=force)


@app.command()
def doctor(
    state: StateDir = None,
    storage: Storage = None,
    address: Annotated[
        str | None, Option(help="Ray cluster to look at: auto or HOST:PORT [default: none].")
    ] = None,
    tracking_uri: Annotated[
        str | None, Option(help="MLflow server to look at [default: those of the sweeps].")
    ] = None,
    gpu: Annotated[
        bool, Option("--gpu", help="Train a small trial on the GPU, and check it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check installation, state folder, sweeps and cluster; exit with 1 if something fails."""
    from dpsweep.cli.verbs import doctor

    doctor.doctor(state, storage, as_json, address=address, tracking_uri=tracking_uri, gpu=gpu)


@app.command()
def audit(
    what: Annotated[
        str,
        Argument(
            metavar="METHOD",
            help="A method, all, or a trial config: what its own step releases is checked.",
        ),
    ] = "all",
    epsilon: Annotated[float, Option(min=0.01, max=50, help="Claimed epsilon.")] = 4.0,
    delta: Annotated[float, Option(min=1e-12, max=0.5, help="Claimed delta.")] = 1e-5,
    sampling_rate: Annotated[
        float, Option("--sampling-rate", min=0.001, max=1, help="q; tightest at 1.")
    ] = 1.0,
    steps: Annotated[int, Option(min=1, help="Steps of a run.")] = 2,
    runs: Annotated[
        int | None,
        Option(min=20, help="Runs with the canary, and without [default: 5000; 0 for a config]."),
    ] = None,
    canaries: Annotated[
        list[str] | None,
        Option("--canary", help="Image that comes and goes: bright, black, noise."),
    ] = None,
    one_run: Annotated[
        int, Option(min=0, help="Audit by one run with so many canaries (say, 200).")
    ] = 0,
    confidence: Annotated[
        float, Option(min=0.5, max=0.999999, help="Of the bounds, all together.")
    ] = 0.99,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Measure a lower bound on a method's epsilon; exit with 1 if it exceeds the claim."""
    from dpsweep.cli.verbs import audit

    plan = {
        "epsilon": epsilon,
        "delta": delta,
        "sampling_rate": sampling_rate,
        "steps": steps,
        "confidence": confidence,
        **({"runs": runs} if runs else {}),
    }
    known = audit.known_canaries(canaries or ["bright"])
    audit.audit(what, settings or [], plan, as_json, known, one_run)


@app.command()
def compare(
    names: Annotated[list[str], Argument(metavar="SWEEP...", help="Names of launched sweeps.")],
    state: Annotated[
        list[str] | None, Option("--state", metavar="FOLDER", help="State folder; repeatable.")
    ] = None,
    reference: Annotated[
        str | None,
        Option(help="Method or sweep the others are tested against [default: the best]."),
    ] = None,
    any_model: Annotated[
        bool, Option("--any-model", help="Compare sweeps of different models.")
    ] = False,
    as_json: Json = False,
    as_markdown: Annotated[bool, Option("--markdown", help="Print Markdown.")] = False,
    out: Annotated[
        Path | None, Option("-o", "--out", help="Write a page, such as compare.html.")
    ] = None,
    storage: Storage = None,
) -> None:
    """Put sweeps and methods side by side, and say which differences are noise."""
    from dpsweep.cli.verbs import compare

    form = compare.form_of(as_json=as_json, as_markdown=as_markdown)
    compare.compare(
        names, state or [], reference, any_model=any_model, form=form, storage=storage, out=out
    )


@app.command()
def reproduce(
    table: Annotated[str, Argument(help="A published table, such as fftkf_table1.")],
    rows: Annotated[str, Option(metavar="NAMES", help="By commas; all if missing.")] = "",
    columns: Annotated[str, Option(metavar="NAMES", help="By commas; all if missing.")] = "",
    methods: Annotated[str, Option(metavar="NAMES", help="By commas; all if missing.")] = "",
    budget: Annotated[
        str, Option(help="Of each cell, such as trials=8,epochs=5; also hours, batch_size.")
    ] = "trials=8",
    seeds: Annotated[int, Option(help="Fresh runs of the best config of each cell.")] = 3,
    epsilon: Annotated[
        list[str] | None, Option(metavar="[ROW=]NUMBER", help="Budget, where the text has lost it.")
    ] = None,
    only_plan: Annotated[
        bool, Option("--plan", help="Print what would run, and how long it takes.")
    ] = False,
    settings: Settings = None,
    state: StateDir = None,
    address: Address = None,
    tracking_uri: Annotated[
        str | None, Option(help="MLflow server; a database in the state folder if missing.")
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", help="Folder; reproduction/TABLE if missing.")
    ] = None,
    accept: Annotated[
        bool, Option("--accept-changes", help="Take over another budget, if harmless.")
    ] = False,
    fetch: Fetch = False,
    quiet: Quiet = False,
) -> None:
    """Run a paper's table again, cell by cell; exit with 1 if a cell has no figure."""
    from dpsweep.cli.verbs import reproduce

    options = reproduce.ReproduceOptions(
        table=table,
        rows=reproduce.split_names(rows),
        columns=reproduce.split_names(columns),
        methods=reproduce.split_names(methods),
        budget=budget,
        seeds=seeds,
        epsilons=epsilon or [],
        settings=settings or [],
        state=state,
        address=address,
        tracking_uri=tracking_uri,
        out=out,
        accept=accept,
        fetch=fetch,
        quiet=quiet,
    )
    (reproduce.plan if only_plan else reproduce.run)(options)


@app.command()
def space(method: Annotated[str, Argument(help="A method, such as fftkf.")]) -> None:
    """Print a method's default search space, ready to paste into a sweep file."""
    from dpsweep.cli.verbs import trial

    trial.space(method)


@app.command()
def models(
    data: Annotated[str, Option(help="Whose shape the images have.")] = "cifar10",
    as_json: Json = False,
) -> None:
    """List the models, with the number of their weights."""
    from dpsweep.cli.verbs import catalogue

    catalogue.models(data, as_json)


@app.command()
def data(
    place: Annotated[Path, Argument(help="A folder of images by class, or an .npz file.")],
) -> None:
    """Print the data section of a trial for images of your own, ready to paste."""
    from dpsweep.cli.verbs import catalogue

    catalogue.data(place)


@app.command()
def schema(kind: Annotated[str, Argument(help="sweep or trial.")] = "sweep") -> None:
    """Print the JSON schema of a sweep file or a trial config, for editors."""
    from dpsweep.cli.verbs import trial

    trial.schema(kind)


@app.command(
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def bench(which: Annotated[str, Argument()] = "step") -> None:
    """Name the scripts that replace `bench step`, `bench sigma` and `bench sweep`."""
    script = which if which in ("sigma", "sweep") else "step"
    raise ConfigError(
        f"bench: moved to scripts of the repository. In a checkout of it, with the same options: "
        f"python benchmarks/{script}.py"
    )


def main() -> None:
    """Run the command line; a mistake is one message on stderr, and exit code 2 (later: 75)."""
    spell_out_letters()
    try:
        app(prog_name="dpsweep")  # also as python -m dpsweep: completion goes by the name
    except DpSweepError as e:
        # Ray sets this for a submitted job's driver, whose log all who see the cluster can read
        hides = isinstance(e, PrivateRowError) and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        error(PrivateRowError.public if hides else str(e))
        sys.exit(e.exit_code)
    except OSError as e:  # what no check foresaw: a place that cannot be written, say
        if e.filename is None:
            raise
        error(f"{e.filename}: cannot be read or written: {e.strerror}. Name another place")
        sys.exit(2)
