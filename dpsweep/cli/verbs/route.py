"""Choice of the place that answers a verb: this machine, or the cluster of a submitted sweep.

A sweep of this machine comes first. Ray is loaded only for one that is elsewhere.
"""

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dpsweep.cli.options import format_options
from dpsweep.cli.say import say
from dpsweep.cluster.submitted import Submitted, all_remembered, read_submitted
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.store.owner import whoami
from dpsweep.store.state_dir import StateFolder

_CLUSTER_PACKAGES = ("pathspec", "aiohttp", "grpc")
"""Modules that the extra `cluster` brings and a plain install may lack."""

if TYPE_CHECKING:
    from dpsweep.cli.verbs.run import Options
    from dpsweep.config.sweep import ResolvedSweep


def import_remote(what: str) -> ModuleType:
    """Import the verbs that reach clusters, which need more packages than all others.

    Raises:
        ConfigError: Naming the extra to install; `what` was typed.
    """
    if missing := [name for name in _CLUSTER_PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"{what}: reaches a Ray cluster, and packages that this needs are not installed here "
            f"({', '.join(missing)}). Install them with: pip install 'dpsweep[cluster]'"
        )
    from dpsweep.cli.verbs import remote

    return remote


def launch_through_client(
    file: Path, settings: list[str], options: "Options", *, fetch: bool, unique: bool
) -> None:
    """Launch through a Ray client, as `submit` does, and fetch the best config at the end.

    A driver on this side of the client would have Tune, and with it the trials' order and ends,
    on the other: study, lease and state folder are where the driver is, so that goes there too.
    """
    if unique:
        raise ConfigError(
            f"--unique: not with --address {options.address}: names are taken in the state folder "
            f"there. Say --name NAME"
        )
    remote = import_remote(f"--address {options.address}")
    remote.submit(
        file,
        settings,
        options.address,
        state=options.state,
        tracking_uri=options.tracking_uri,
        storage=options.storage,
        out=options.out,
        fetch_best=True,
        quiet=options.quiet,
        words=format_options({"download": fetch}),
    )


def ask_cluster(verb: str, name: str | None, state: str | None, **options: Any) -> bool:
    """Let the cluster answer; False if the sweep is not elsewhere."""
    sweep = _elsewhere(name, state)
    if sweep:
        import_remote(verb).answer(sweep, [verb, sweep.name, *format_options(options)])
    return sweep is not None


def export_from_cluster(name: str, state: str | None, top: int, out: Path) -> bool:
    """Fetch the best configs from the cluster; False if the sweep is not elsewhere."""
    sweep = _elsewhere(name, state)
    if sweep:
        import_remote("export").export(sweep, format_options({"top": top}), out)
    return sweep is not None


def resume_on_cluster(
    name: str,
    file: "ResolvedSweep | None",
    state: str | None,
    address: str | None,
    storage: str | None,
    *,
    out: Path | None,
    quiet: bool,
    words: list[str],
) -> bool:
    """Go on with the sweep on its cluster; False if it is not elsewhere."""
    sweep = _elsewhere(name, state)
    if sweep is None and address is not None and "://" in address:
        sweep = Submitted(name, address, state, whoami())  # submitted from another machine
        state = None
    if sweep is None:
        return False
    if address is not None and "://" not in address:
        raise ConfigError(
            f"--address {address}: {name} was submitted to {sweep.address}. Leave --address out, "
            f"or say where that cluster is now: http://HOST:8265"
        )
    import_remote("resume").resume(
        sweep, address, file=file, state=state, storage=storage, out=out, quiet=quiet, words=words
    )
    return True


def refuse_elsewhere(verb: str, name: str | None, state: str | None) -> None:
    """Raise StateError for a verb that the cluster of a submitted sweep does not answer."""
    sweep = _elsewhere(name, state)
    if sweep:
        raise StateError(
            f"sweep {sweep.name!r} runs at {sweep.address}, and `{verb}` is not answered from "
            f"here. Type it on a node of that cluster; from here: dpsweep status | best "
            f"{sweep.name}, dpsweep export {sweep.name} -o FOLDER"
        )


def tell_submitted(state: str | None) -> None:
    """One line for each sweep that was sent away."""
    for sweep in all_remembered(StateFolder.at(state)):
        say(f"{sweep.name} was submitted to {sweep.address}; see: dpsweep status {sweep.name}")


def _elsewhere(name: str | None, state: str | None) -> Submitted | None:
    """The submitted sweep that is meant; None if it is one of this machine, or none at all."""
    if name is None or "/" in name:
        return None
    here = StateFolder.at(state)
    known = read_submitted(name, here)
    return known if known and not here.sweep(name).exists else None
