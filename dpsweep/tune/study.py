"""The study: the one durable truth about a sweep's trials.

Everything the search knows is in Optuna's storage before anything else hears of it. A driver
may die at any moment; the next one reads here which trials are through and which to go on
with. The same call made twice leaves the same state.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.trial import FrozenTrial, TrialState

from dpsweep.config.sweep import Sweep, build_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.core.types import Row
from dpsweep.tune.space import OptunaDraw, pruner, sampler
from dpsweep.tune.state import State

TrialEnd = Literal["complete", "pruned", "failed"]
_STATES = {
    TrialState.RUNNING: "running",
    TrialState.WAITING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_ENDS = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


@dataclass(frozen=True)
class Record:
    """One trial, as the study knows it.

    Attributes:
        number: Counted from 0 in the order of asking.
        state: running, complete, pruned or failed. A running trial may have lost its driver.
        config: The resolved trial config.
        knobs: What was searched, by dotted key of the config.
        row: Its last report; None before the first.
        value: The objective at the last report.
        reason: Why it failed.
        void: True if a test secret was used.
        handed_out: True once its secret was drawn.
    """

    number: int
    state: str
    config: TrialConfig
    knobs: dict[str, Any]
    row: Row | None
    value: float | None
    reason: str | None
    void: bool
    handed_out: bool

    @property
    def seconds(self) -> float:
        """Time spent training it, over restarts."""
        return self.row["seconds"] if self.row else 0.0


class Study:
    """An Optuna study and the sweep it searches."""

    def __init__(self, study: optuna.Study, sweep: Sweep) -> None:
        self._study, self.sweep = study, sweep
        study.pruner = pruner(sweep.config.stop)

    @classmethod
    def create(cls, storage_uri: str, sweep: Sweep) -> "Study":
        """A new study.

        Raises:
            StateError: If the storage has one of this name.
        """
        try:
            study = optuna.create_study(
                study_name=sweep.name,
                storage=_storage(storage_uri),
                direction=sweep.config.objective.direction,
            )
        except optuna.exceptions.DuplicatedStudyError as e:
            raise StateError(
                f"name: the storage already has a study called {sweep.name!r}. Launch under "
                f"another name with --name {sweep.name}-2"
            ) from e
        return cls(study, sweep)

    @classmethod
    def open(cls, storage_uri: str, sweep: Sweep) -> "Study":
        """The study of a sweep that was launched before.

        Raises:
            StateError: If the storage has none of this name.
        """
        try:
            study = optuna.load_study(study_name=sweep.name, storage=_storage(storage_uri))
        except KeyError as e:
            raise StateError(
                f"the storage has no study called {sweep.name!r}: what its trials spent is not "
                f"known. Restore study.db, or delete the folder sweeps/{sweep.name} and launch anew"
            ) from e
        return cls(study, sweep)

    def records(self) -> list[Record]:
        """All trials that have a config, by number."""
        trials = self._study.get_trials(deepcopy=False)
        return [_record(trial) for trial in trials if "config" in trial.user_attrs]

    def record(self, number: int) -> Record:
        """One trial."""
        return _record(self._frozen(number))

    def num_asked(self) -> int:
        """Trials asked for so far, whatever became of them."""
        return len(self._study.get_trials(deepcopy=False))

    def running(self) -> list[int]:
        """Numbers of the trials that were asked for and not told."""
        states = (TrialState.RUNNING, TrialState.WAITING)
        return [t.number for t in self._study.get_trials(deepcopy=False, states=states)]

    def ask(self) -> Record:
        """The next trial, stored with its config before this returns."""
        number = self.num_asked()
        self._seed(number)
        trial = self._study.ask()
        assert trial.number == number, "a sweep has one driver, and it holds the lease"
        return self._draw(trial)

    def adopt(self, number: int) -> Record:
        """A running trial whose driver died, once more; drawn to the end if it was not."""
        frozen = self._frozen(number)
        if "config" in frozen.user_attrs:
            return _record(frozen)
        self._seed(number)
        return self._draw(self._open_trial(frozen))

    def _seed(self, number: int) -> None:
        """Sets the sampler for one trial; before the trial is opened, since that may sample."""
        self._study.sampler = sampler(self.sweep.config.sampler, self.sweep.config.seed, number)

    def _draw(self, trial: optuna.Trial) -> Record:
        tree, knobs = self.sweep.space.draw(self.sweep.base.tree, OptunaDraw(trial))
        try:
            config = self.sweep.trial(tree)
        except ConfigError as e:
            self._study.tell(trial, state=TrialState.FAIL)
            raise ConfigError(f"trial {trial.number} of the search is no valid config: {e}") from e
        trial.set_user_attr("knobs", knobs)
        trial.set_user_attr("config", config.model_dump(mode="json"))
        return self.record(trial.number)

    def hand_out(self, number: int, *, void: bool) -> Record:
        """Notes that a trial's secret exists: from now on it must never be drawn again."""
        trial = self._open_trial(self._frozen(number))
        trial.set_user_attr("void", void)
        trial.set_user_attr("handed_out", True)
        return self.record(number)

    def report(self, number: int, row: Row) -> bool:
        """Stores a trial's report. False if the study already knew it."""
        frozen = self._frozen(number)
        known = frozen.user_attrs.get("row")
        if frozen.state.is_finished() or (known and row["epoch"] <= known["epoch"]):
            return False
        trial = self._open_trial(frozen)
        trial.report(row[self.sweep.config.objective.metric], int(row["epoch"]))
        trial.set_user_attr("row", row)
        return True

    def should_prune(self, number: int) -> bool:
        """True if the trial does too badly to go on."""
        return self._open_trial(self._frozen(number)).should_prune()

    def tell(self, number: int, end: TrialEnd, *, reason: str | None = None) -> Record:
        """Ends a trial. A complete one without a finite objective counts as failed."""
        frozen = self._frozen(number)
        if frozen.state.is_finished():
            return _record(frozen)
        value = _objective(frozen, self.sweep)
        if end == "complete" and value is None:
            end, reason = "failed", f"{self.sweep.config.objective.metric} is not a finite number"
        trial = self._open_trial(frozen)
        trial.set_user_attr("reason", reason)
        self._study.tell(
            frozen.number, values=value if end == "complete" else None, state=_ENDS[end]
        )
        return self.record(number)

    def best(self) -> list[Record]:
        """Complete trials, the best first."""
        done = [r for r in self.records() if r.state == "complete" and r.value is not None]
        sign = -1 if self._study.direction == optuna.study.StudyDirection.MAXIMIZE else 1
        return sorted(done, key=lambda r: (sign * (r.value or 0.0), r.number))

    def _open_trial(self, frozen: FrozenTrial) -> optuna.Trial:
        """A trial of the storage as one that can be written to."""
        return optuna.Trial(self._study, frozen._trial_id)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]


def stored_sweep(name: str, state: State) -> Sweep:
    """The sweep as it was launched.

    Raises:
        StateError: If there is none of this name.
    """
    file, base = state.sweep(name).stored()
    return build_sweep(file, base)


def open_study(name: str, state: State) -> Study:
    """The study of a sweep, to read; driven by another process or by none."""
    return Study.open(state.storage_uri, stored_sweep(name, state))


def _storage(uri: str) -> optuna.storages.RDBStorage:
    """Optuna's tables, with patience where another process holds the file."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = {"connect_args": {"timeout": 60}} if uri.startswith("sqlite") else {}
    return optuna.storages.RDBStorage(uri, engine_kwargs=options)


def _record(trial: FrozenTrial) -> Record:
    attrs = trial.user_attrs
    values = trial.intermediate_values
    return Record(
        number=trial.number,
        state=_STATES[trial.state],
        config=TrialConfig.model_validate(attrs["config"]),
        knobs=attrs["knobs"],
        row=attrs.get("row"),
        value=values[max(values)] if values else None,
        reason=attrs.get("reason"),
        void=bool(attrs.get("void", False)),
        handed_out=bool(attrs.get("handed_out", False)),
    )


def _objective(trial: FrozenTrial, sweep: Sweep) -> float | None:
    row = trial.user_attrs.get("row")
    value = row[sweep.config.objective.metric] if row else None
    return value if value is not None and math.isfinite(value) else None
