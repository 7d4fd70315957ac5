"""The same from Python: launch a sweep, open it, look at it, export what it found.

    import dpsweep

    sweep = dpsweep.launch("sweeps/quickstart.yaml")
    sweep.trials.sort_values("valid/accuracy")
    sweep.figures["history"].show()
    sweep.best.optimizer.lr

Nothing here is done otherwise than on the command line: the same checks, the same state folder,
the same statements. `import dpsweep` loads none of it before it is used.
"""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from pydantic import BaseModel
from rich.console import Console

from dpsweep.app import orchestrator
from dpsweep.app.orchestrator import Outcome, Place, Screen
from dpsweep.config.source import Source
from dpsweep.config.sweep import ResolvedSweep, SweepConfig, load_sweep, parse_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.results.best_trials import make_no_result_error, make_no_trial_error
from dpsweep.results.export import origin_of
from dpsweep.results.formats import export_best
from dpsweep.results.register import Registered, register_best
from dpsweep.results.tables import num_trials_and_repeats, run_words
from dpsweep.search.charge import describe_trial_privacy, get_charged_run
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import StateFolder, SweepFolder
from dpsweep.store.storage import resolve_moved_uri, resolve_storage_uri
from dpsweep.store.study import Study, open_study
from dpsweep.training.trial_dir import TrialDir

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Spec = str | Path | Mapping[str, Any] | SweepConfig
"""A sweep: the path of its file, what the file would hold, or that as the typed object."""

_WIDTH = 120
_MADE_HERE = "launch(spec)"


def launch(
    spec: Spec,
    *,
    settings: Sequence[str] = (),
    name: str | None = None,
    state: str | Path | None = None,
    address: str | None = None,
    tracking_uri: str | None = None,
    storage: str | None = None,
    out: str | Path | None = None,
    download: bool = False,
    quiet: bool = False,
) -> "OpenSweep":
    """Run a sweep to its end, on a Ray that is started and ended here, and open it.

    The first Ctrl-C (in Jupyter: interrupt the kernel) stops it in good order: trials keep their
    state, and `resume` goes on. In another thread than the main one it cannot be interrupted so.

    Args:
        spec: A path of a YAML file; a mapping of what it would hold, with `base` a mapping, a
            TrialConfig or a path; or a SweepConfig.
        settings: `KEY=VALUE`, as --set has them.
        name: Instead of the spec's.
        state: State folder; DPSWEEP_STATE or ./.dpsweep if None.
        address: Of a Ray cluster; an embedded one if None.
        tracking_uri: Of an MLflow server; a file in the state folder if None.
        storage: Database of the study; DPSWEEP_STORAGE or a file in the state folder if None.
        out: Where the best config goes as YAML; nowhere but to the state folder if None.
        download: Whether missing data are fetched.
        quiet: Whether to print nothing.

    Raises:
        DpSweepError: For what is wrong with the spec, the data or a service, before anything is
            started or written; and if the sweep ends without a complete trial.
        KeyboardInterrupt: At a second Ctrl-C.

    >>> launch("nobody.yaml")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpsweep.core.errors.ConfigError: nobody.yaml: no such file. Check the path, or ...
    """
    sweep = _sweep(spec, [*settings, *([f"name={name}"] if name else [])])
    place = Place(_state(state), address, tracking_uri, resolve_storage_uri(storage))
    outcome = orchestrator.launch(
        sweep, place, _screen(quiet=quiet), out=None if out is None else Path(out), fetch=download
    )
    return _open_finished_sweep(outcome, place.state, quiet=quiet)


def resume(
    name: str,
    *,
    state: str | Path | None = None,
    address: str | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
) -> "OpenSweep":
    """Go on with a sweep that was stopped or whose driver died, and open it.

    Args:
        name: Of a launched sweep.
        state: State folder; DPSWEEP_STATE or ./.dpsweep if None.
        address: Of a Ray cluster; an embedded one if None.
        out: Where the best config goes as YAML; nowhere but to the state folder if None.
        quiet: Whether to print nothing.

    Raises:
        DpSweepError: If there is none, or another process drives it; and if it ends without a
            complete trial.
        KeyboardInterrupt: At a second Ctrl-C.
    """
    where, short = _state(state).part(name)
    outcome = orchestrator.resume(
        short, Place(where, address), _screen(quiet=quiet), out=None if out is None else Path(out)
    )
    return _open_finished_sweep(outcome, where, quiet=quiet)


def open(name: str, *, state: str | Path | None = None, storage: str | None = None) -> "OpenSweep":
    """A sweep that was launched, to look at: running, stopped or finished.

    Args:
        name: Of a launched sweep; OWNER/NAME for somebody else's.
        state: State folder; DPSWEEP_STATE or ./.dpsweep if None.
        storage: Database of the study, if it has moved.

    Raises:
        StateError: If there is none of this name.
    """
    where, short = _state(state).part(name)
    study = open_study(short, where, resolve_moved_uri(storage))
    return OpenSweep(study, where.sweep(short), where)


@dataclass(frozen=True)
class OpenSweep:
    """A sweep to look at. What is asked of it is read anew each time: it may be running."""

    _study: Study
    _folder: SweepFolder
    _state: StateFolder

    @property
    def name(self) -> str:
        """Its name."""
        return self._study.sweep.name

    @property
    def config(self) -> SweepConfig:
        """Sweep config that was launched."""
        return self._study.sweep.config

    @property
    def state(self) -> Literal["running", "finished", "stopped"]:
        """State of the sweep: running, finished, or stopped (waiting for `resume`)."""
        if self._folder.owner():
            return "running"
        return "finished" if self._study.is_finished() else "stopped"

    @property
    def trials(self) -> pd.DataFrame:
        """One row a trial, by its number.

        Columns: `state` (running, complete, pruned, failed), `confirms` (the trial it repeats;
        empty for one of the search), `expected` (posterior mean of the objective at its config,
        where the best is chosen by that), one of each searched key by its dotted name, the metrics
        of its last report by theirs, `epsilon` (spent by that report), `charged` (epsilon that the
        trial is charged for, its whole length; of a run by itself, the search adds up in
        `privacy`), `delta`, `noise_multiplier`, `void`, `seconds`.
        """
        rows = [_row(record) for record in self._study.records()]
        return pd.DataFrame(rows, columns=_columns(rows)).set_index("number")

    @property
    def curves(self) -> pd.DataFrame:
        """One row a report: `number` of the trial, `epoch`, `step`, and what it reported."""
        rows = []
        for record in self._study.records():
            place = self._folder.trial_dir(record.number)
            reported = TrialDir(place).rows() if record.row and place.exists() else []
            last = record.row["epoch"] if record.row else 0
            rows += [{"number": record.number, **r} for r in reported if r["epoch"] <= last]
        return pd.DataFrame(rows, columns=None if rows else ["number", "epoch", "step"])

    @property
    def best(self) -> TrialConfig:
        """The best config: by its repeats with fresh noise, where there are any.

        Raises:
            StateError: If no trial is complete yet.
        """
        return self._best().config

    @property
    def privacy(self) -> str:
        """Privacy statement of the best trial by itself, and of the search as a whole."""
        best, words = self._study.best(), origin_of(self._study).search_words
        return f"{describe_trial_privacy(best[0])} {words}" if best else words

    @property
    def selection_bias(self) -> str:
        """Selection bias of the best trial's result, in a sentence.

        Raises:
            StateError: If no trial is complete yet.
        """
        return origin_of(self._study).describe_selection_bias(self._best())

    @property
    def figures(self) -> "dict[str, Figure]":
        """Plotly figures by name; those that have something to show."""
        from dpsweep.results.figures import figures  # half a second, for whoever asks

        return figures(self._study, self._folder)

    def export(
        self,
        out: str | Path = "best",
        format: Literal["yaml", "opacus", "torch"] = "yaml",
        top: int = 1,
    ) -> list[Path]:
        """Write the best configs to the folder `out`, and return the files.

        Args:
            out: The folder.
            format: yaml, to train again; opacus, a training script that needs nothing of ours;
                torch, the weights and a script that uses them.
            top: How many, of each budget.

        Raises:
            ConfigError: If a winner cannot be had in that format; with the reason.
            StateError: If no trial is complete, or a file that is none of ours is in the way.
        """
        written = export_best(self._study, self._folder, Path(out), format, top)
        return [file.path for file in written]

    def register(
        self, name: str, *, alias: str = "champion", allow_void: bool = False
    ) -> list[Registered]:
        """Put the best model into the registry of the sweep's tracking server.

        Args:
            name: Of the registered model. One budget's is called NAME-epsilon-E, if there are
                several.
            alias: Which then stands for this version: models:/NAME@ALIAS.
            allow_void: Whether a sweep with a fixed test secret may be registered, as void.

        Raises:
            StateError: If the sweep is not finished, or void, or its weights were not kept.
            ConnectionRefused: If the tracking server does not answer.
        """
        return register_best(
            self._study, self._folder, self._state, name, alias=alias, allow_void=allow_void
        )

    def _best(self) -> Record:
        best = self._study.best()
        if not best:
            raise make_no_result_error(self._study)
        return best[0]

    def __repr__(self) -> str:
        ran = run_words(
            *num_trials_and_repeats(self._study.records()), explores=self._study.sweep.explores
        )
        return f"<dpsweep sweep {self.name!r}: {self.state}, {ran}>"


def _sweep(spec: Spec, settings: list[str]) -> ResolvedSweep:
    if isinstance(spec, str | Path):
        return load_sweep(spec, settings)
    try:
        tree = json.loads(json.dumps(_to_yaml_value(spec), default=_to_yaml_value))
    except TypeError as e:
        raise ConfigError(
            f"{_MADE_HERE}: {e}. A sweep is made of mappings, lists, numbers, texts and configs"
        ) from e
    return parse_sweep(Source(_MADE_HERE, tree, {}), Path(), settings)


def _to_yaml_value(value: object) -> object:
    """Convert a value to what a YAML file would hold."""
    match value:
        case BaseModel():
            return value.model_dump(mode="json", exclude_none=True)
        case Mapping():
            return dict(value)
        case Path():
            return str(value)
        case tuple():
            return list(value)
    raise TypeError(f"{value!r} is of type {type(value).__name__}")


def _state(folder: str | Path | None) -> StateFolder:
    return StateFolder.at(None if folder is None else str(folder))


def _screen(*, quiet: bool) -> Screen:
    console = Console(
        file=sys.stdout,
        quiet=quiet,
        width=_WIDTH,
        force_terminal=False,
        force_jupyter=False,
        highlight=False,
    )
    return Screen(console, _warn, lambda folder: f"dpsweep.resume({folder.called!r})")


def _open_finished_sweep(outcome: Outcome, state: StateFolder, *, quiet: bool) -> OpenSweep:
    """The sweep that has just run, once its result is printed.

    Raises:
        StateError: If it is finished, and no trial of it was completed.
    """
    screen, best = _screen(quiet=quiet), outcome.best
    if best:
        screen.console.print(outcome.origin.describe_selection_bias(best[0]), markup=False)
    screen.console.print(outcome.origin.search_words, markup=False)
    if not outcome.complete:
        screen.console.print(
            f"Stopped. Go on with: {screen.resume_command(outcome.folder)}", markup=False
        )
    elif not best:
        name = outcome.study.sweep.name
        raise make_no_trial_error(outcome.study, f"dpsweep.open({name!r}).trials")
    return OpenSweep(outcome.study, outcome.folder, state)


def _warn(words: list[str]) -> None:
    for word in words:
        warnings.warn(word, stacklevel=4)


def _row(record: Record) -> dict[str, Any]:
    row = dict(record.row or {})
    return {
        "number": record.number,
        "state": record.state,
        "confirms": record.confirms,
        "expected": record.expected,
        **record.hyperparams,
        **row,
        "epsilon": row.get("privacy/epsilon_spent"),
        "charged": _get_trial_epsilon(record),
        "delta": record.config.delta,
        "void": record.void,
        "seconds": record.seconds,
    }


def _get_trial_epsilon(record: Record) -> float | None:
    """Epsilon of the trial's whole length by itself; None if it never began."""
    if not record.dispatched:
        return None
    return record.epsilon or get_charged_run(record).epsilon(record.config.delta)


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    """All keys in the order they come; those of an empty table."""
    found = list(dict.fromkeys(key for row in rows for key in row))
    return found or ["number", "state", "epsilon", "charged", "seconds"]
