"""The best configs of a search as files.

yaml to train them again, opacus to train them without us, torch and huggingface to use their
weights.
"""

import math
import runpy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, StateError, unknown_name_error
from dpsweep.core.own_code import import_folder
from dpsweep.data.read import list_class_names
from dpsweep.models.own import Own
from dpsweep.results.best_trials import choose_trials, make_no_result_error, name_config_file
from dpsweep.results.export import (
    Origin,
    check_target,
    export_facts,
    header,
    origin_of,
    to_yaml,
    write,
)
from dpsweep.results.formats.huggingface import load_trained, write_huggingface
from dpsweep.results.formats.opacus import to_opacus
from dpsweep.results.formats.torch import to_torch
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import SweepFolder
from dpsweep.store.study import Study

_ROUNDING = 0.001
"""Of an accuracy measured again: another machine's sums may turn a few images."""


@dataclass(frozen=True)
class Winner:
    """A trial to be exported."""

    record: Record
    rank: int  # its place in the search, from 1
    origin: Origin
    weights: Path  # where its trained weights are, if they were kept


@dataclass(frozen=True)
class Exported:
    """A file that was written."""

    path: Path
    words: str  # what is told of it


@dataclass(frozen=True)
class Format:
    """A kind of export."""

    suffix: str  # of its files
    # writes one winner to a path, and says what there is to say of it
    write: Callable[[Winner, Path], str]


def export_best(
    study: Study, folder: SweepFolder, out: Path, kind: str = "yaml", top: int = 1
) -> list[Exported]:
    """Write the best configs of a search to a folder.

    Raises:
        ConfigError: If there is no such format, or a winner cannot be had in it.
        StateError: If there is no complete trial yet, or a file of another kind is in the way.
    """
    if kind not in FORMATS:
        raise unknown_name_error("format", kind, FORMATS, where="--format")
    records, origin = choose_trials(study, top), origin_of(study)
    if not records:
        raise make_no_result_error(study)
    suffix = FORMATS[kind].suffix
    places = [
        name_config_file(r, out / f"{rank:02d}-trial-{r.number:04d}{suffix}")
        for rank, r in enumerate(records, 1)
    ]
    for place in places:
        check_target(place)
    written = []
    for rank, (place, record) in enumerate(zip(places, records, strict=True), 1):
        weights = folder.trial_dir(record.number) / "weights.pt"
        words = FORMATS[kind].write(Winner(record, rank, origin, weights), place)
        written.append(Exported(place, words))
    return written


def kept_weights(winner: Winner) -> Path:
    """Get the folder of a winner's weights; StateError if they were not kept."""
    if not winner.weights.exists():
        raise StateError(
            f"the weights of trial {winner.record.number} are not kept any more; those of the best "
            f"few are. Train it again: dpsweep export {winner.origin.sweep} -o best, and then "
            f"dpsweep train on that file"
        )
    return winner.weights


def _yaml(winner: Winner, place: Path) -> str:
    write(place, to_yaml(winner.record, winner.rank, winner.origin))
    return _figure(winner)


def _opacus(winner: Winner, place: Path) -> str:
    script = to_opacus(winner.record.config)
    how = (
        "train it again with Opacus and torch alone: python THIS_FILE. Each run draws fresh noise, "
        "spends its own epsilon, and is one more release of the same data"
    )
    write(place, f"{_header(winner, how)}\n{script}")
    return f"{_figure(winner)}, to train with: python {place}"


def _torch(winner: Winner, place: Path) -> str:
    weights, config = kept_weights(winner), winner.record.config
    accuracy = (winner.record.row or {}).get("valid/accuracy", math.nan)
    script = to_torch(config, accuracy, list(list_class_names(config.data)))
    if math.isnan(accuracy):
        raise ConfigError(
            f"data.task.metrics: the script checks itself by accuracy, and this sweep measured "
            f"{', '.join(config.data.task.metric_names)}. Export with --format yaml or --register "
            f"NAME"
        )
    how = f"use it with torch alone: python THIS_FILE IMAGE; its weights are {place.stem}.pt"
    write(place, f"{_header(winner, how)}\n{script}")
    shutil.copyfile(weights, place.with_suffix(".pt"))
    return f"{_figure(winner)}, {_run_check(place, config, accuracy)}"


def _huggingface(winner: Winner, place: Path) -> str:
    origin = winner.origin
    use = "it needs transformers, and nothing of dpsweep"
    facts = export_facts(winner.record, winner.rank, origin, use)
    config, weights = winner.record.config, kept_weights(winner)
    model = load_trained(config, weights)
    write_huggingface(config, model, place, facts)
    return f"{_figure(winner)}, with model, head and adapter beside it"


def _header(winner: Winner, how: str) -> str:
    return header(winner.record, winner.rank, winner.origin, how)


def _figure(winner: Winner) -> str:
    return f"{winner.origin.metric} {winner.record.value:.4f}"


def _run_check(place: Path, config: TrialConfig, accuracy: float) -> str:
    """Run the script's own check, where the data are at hand.

    Raises:
        StateError: If the script classifies otherwise than the trial did.
    """
    try:
        with import_folder(config.model.folder if isinstance(config.model, Own) else None):
            found = runpy.run_path(str(place))["check"](config.data.root)
    except (OSError, RuntimeError):
        return "not checked: the data are not at hand"
    if abs(found - accuracy) > _ROUNDING:
        raise StateError(
            f"{place}: reaches {found:.4f}, and the trial reported {accuracy:.4f}. Its data or its "
            f"weights are others than they were; do not use it"
        )
    return f"checked: accuracy {found:.4f}"


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "yaml": Format(".yaml", _yaml),
        "opacus": Format(".py", _opacus),
        "torch": Format(".py", _torch),
        "huggingface": Format("/README.md", _huggingface),
    }
)
"""By their name on the command line."""
