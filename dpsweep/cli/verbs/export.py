"""The verb that hands a winner on: export, to files and to MLflow's registry."""

from pathlib import Path

from dpsweep.cli.say import say
from dpsweep.core.errors import ConfigError
from dpsweep.results.formats import export_best
from dpsweep.results.register import register_best
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.storage import resolve_moved_uri
from dpsweep.store.study import open_study


def export(
    name: str,
    state_folder: str | None,
    storage: str | None,
    *,
    out: Path | None,
    kind: str,
    top: int,
    register: str | None,
    alias: str,
    allow_void: bool,
) -> None:
    """Write the best configs to a folder, or register the best model, or both."""
    if out is None and register is None:
        raise ConfigError(
            "export: says neither where the files go nor what to register. Give -o FOLDER, or "
            "--register NAME"
        )
    state, short = StateFolder.at(state_folder).part(name)
    study, folder = open_study(short, state, resolve_moved_uri(storage)), state.sweep(short)
    if out is not None:
        for file in export_best(study, folder, out, kind, top):
            say(f"{file.path}   {file.words}")
    if register is not None:
        for found in register_best(
            study, folder, state, register, alias=alias, allow_void=allow_void
        ):
            say(found.words)
