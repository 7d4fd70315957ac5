"""The study: the one durable truth about a sweep's trials.

Everything the search knows is in Optuna's storage before anything else hears of it. A driver
may die at any moment; the next one reads here which trials are through and which to go on
with. The same call made twice leaves the same state.
"""

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState

from dpsweep.compat import restrict_study, storage_of, study_id
from dpsweep.config.sweep import ResolvedSweep, resolve_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.core.types import Row
from dpsweep.search.charge import Plans, check_privacy_cap, make_ledger_entry
from dpsweep.search.confirmation import (
    Confirmation,
    count_missing_repeats,
    find_next_repeat,
    make_repeat_config,
    summarize_repeats,
)
from dpsweep.search.distributions import make_pruner
from dpsweep.search.objectives import find_pareto_front, get_goal_values
from dpsweep.search.propose import propose
from dpsweep.search.ranking import Choice, make_choice, rank_best, rank_trials
from dpsweep.search.trial_record import DISPATCHED, Record, make_attributes, make_record
from dpsweep.search.warm_start import collect_earlier_trials, make_history
from dpsweep.store.retry import retry_if_interrupted
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.storage import (
    FOLDER,
    OWNER,
    check_study_owner,
    make_study_taken_error,
    open_storage,
)

log = logging.getLogger(__name__)

Watcher = TypeVar("Watcher")

Curve = tuple[tuple[int, float], ...]
"""(epoch, objective) at each report, by epoch."""

TrialEnd = Literal["complete", "pruned", "failed"]
_ENDS = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}

_WARM, _TOLD, _VOID, _ENDED = "warm_start", "warm_start_points", "void", "ended_at"
_PLANS, _CHOICE = "plans", "expected"
"""Attributes of the study: which earlier sweep was learned from, what it told, whether a test
secret was used, how many trials were planned when the search ended with fewer, how many runs
were planned over time, and by what the best config is chosen."""


class Study:
    """An Optuna study and the sweep it searches."""

    holds_failures = True

    def __init__(self, study: optuna.Study, sweep: ResolvedSweep) -> None:
        self._study, self.sweep, self._storage = study, sweep, storage_of(study)
        self._ids: dict[int, int] = {}
        self._configs: dict[int, TrialConfig] = {}
        study.pruner = make_pruner(sweep.config.pruner)

    @classmethod
    def create(
        cls,
        storage_uri: str,
        sweep: ResolvedSweep,
        folder_id: str | None = None,
        *,
        name: str | None = None,
        owner: str | None = None,
    ) -> "Study":
        """A new study, marked as that of one state folder's sweep and one owner.

        Args:
            name: What it is called there; as the sweep if None.
            owner: Whose it is.

        Raises:
            StateError: If the storage has one of this name.
        """
        try:
            study = optuna.create_study(
                study_name=name or sweep.name,
                storage=open_storage(storage_uri),
                directions=sweep.config.objective.directions,
            )
        except optuna.exceptions.DuplicatedStudyError as e:
            raise make_study_taken_error(name or sweep.name, storage_uri) from e
        if folder_id:
            study.set_user_attr(FOLDER, folder_id)
        if owner:
            study.set_user_attr(OWNER, owner)
        made = cls(study, sweep)
        made.note_plan()
        return made

    @classmethod
    def open(
        cls,
        storage_uri: str,
        sweep: ResolvedSweep,
        folder_id: str | None = None,
        *,
        name: str | None = None,
    ) -> "Study":
        """The study of a sweep that was launched before; called `name` there, if not as the sweep.

        Raises:
            StateError: If the storage has none of this name, or that of another state folder.
        """
        try:
            study = optuna.load_study(
                study_name=name or sweep.name, storage=open_storage(storage_uri)
            )
        except KeyError as e:
            raise StateError(
                f"the storage has no study called {name or sweep.name!r}: what its trials spent is "
                f"not known. Restore study.db, or delete the folder sweeps/{sweep.name} and launch "
                f"anew"
            ) from e
        if folder_id:
            check_study_owner(study, folder_id, storage_uri)
        return cls(study, sweep)

    def admit(self, watchers: list[Watcher]) -> list[Watcher]:
        """All of them: trials may be watched."""
        return watchers

    def log(self, words: str) -> None:
        """Tell the user of a trouble that the search survives."""
        log.warning("%s", words)

    def describe_trouble(self, trouble: str) -> str:
        """Return a trouble that stops the search, in full."""
        return trouble

    def begin(self, reconcile: Callable[[], None]) -> None:
        """Tell the tracker all that is known: what was lost on the way is made good."""
        reconcile()

    def publish(self, study: "Study", reconcile: Callable[[], None]) -> None:
        """Tell nothing more: everything was told when it happened."""

    def stored_trials(self) -> list[FrozenTrial]:
        """Every trial as Optuna stores it, by number, to read."""
        return self._study.get_trials(deepcopy=False)

    def restrict_to(self, numbers: Collection[int]) -> "Study":
        """The study with the numbered trials alone, to read: one method's, say, at one epsilon."""
        seen = [trial for trial in self.stored_trials() if trial.number in numbers]
        return Study(restrict_study(self._study, seen), self.sweep)

    @retry_if_interrupted
    def records(self) -> list[Record]:
        """All trials that have a config, by number."""
        trials = self.stored_trials()
        found = [self._record(trial) for trial in trials if "config" in trial.user_attrs]
        noted = self._study.user_attrs.get(_CHOICE)
        if noted is None or noted["trials"] != _complete(found):
            return found
        return Choice(dict(noted["values"]), noted.get("margin")).apply(found)

    @retry_if_interrupted
    def record(self, number: int) -> Record:
        """One trial."""
        return self._record(self._get_frozen_trial(number))

    @retry_if_interrupted
    def num_asked(self) -> int:
        """Trials of the search asked for so far, whatever became of them."""
        return sum("confirms" not in trial.user_attrs for trial in self.stored_trials())

    def num_to_ask(self) -> int:
        """Trials that the search still has to ask for; none once it has ended early."""
        return 0 if self._has_ended() else self._num_left()

    def num_dropped(self) -> int:
        """Trials that were planned and never asked for when the search ended."""
        return self._num_left() if self._has_ended() else 0

    @property
    def num_planned(self) -> int:
        """Runs in all, those to come included; more than the sweep's if others became the best."""
        left = self.num_to_ask() + self.num_to_confirm()
        return max(self.sweep.num_runs, len(self.records()) + left)

    @retry_if_interrupted
    def note_plan(self) -> None:
        """Note how many runs the sweep plans, and how many had begun, if that changed.

        To be called by whoever drives the sweep, before the first run under another plan.
        """
        plans: list[list[int]] = self._study.user_attrs.get(_PLANS, [])
        if not plans or plans[-1][0] != self.sweep.num_runs:
            begun = sum(record.dispatched for record in self.records())
            self._study.set_user_attr(_PLANS, [*plans, [self.sweep.num_runs, begun]])

    @property
    def plans(self) -> Plans:
        """Runs that were planned, and how many had begun by then; the first with none, if any.

        Plans that changed before a run had begun are forgotten: there were no results to see.
        """
        plans: list[list[int]] = self._study.user_attrs.get(_PLANS, [])
        unseen = sum(begun == 0 for _, begun in plans)
        return tuple((planned, begun) for planned, begun in plans[max(0, unseen - 1) :])

    def _num_left(self) -> int:
        return max(0, self.sweep.config.budget.trials - self.num_asked())

    @retry_if_interrupted
    def _has_ended(self) -> bool:
        """True if repeats of the best began before all trials of this budget were asked for.

        If that search went on, a better trial would want repeats as well, and results would have
        decided how many runs there are. One with more trials than that is another plan.
        """
        return bool(self._study.user_attrs.get(_ENDED) == self.sweep.config.budget.trials)

    def num_to_confirm(self) -> int:
        """Repeats of the best configs still to be run, at most; or 1 for the final run."""
        config = self.sweep.config.confirm
        if not self._has_second_part:
            return 0
        records = self.records()
        if self.num_to_ask() or any(r.state == "running" and r.confirms is None for r in records):
            left = self.sweep.num_runs - self.sweep.config.budget.trials  # the best may be others
        elif config is None:
            left = 1 if self._chosen_for_final(records) else 0
        else:
            left = sum(
                count_missing_repeats(self._ranking(records), self._list_repeats(), config).values()
            )
        return min(left, self._num_affordable())

    def is_finished(self) -> bool:
        """True if nothing is left to run; a private selection is told in one piece at its end."""
        if self.sweep.is_private_selection:
            return self.num_asked() > 0
        return not (self.running() or self.num_to_ask() or self._choose_next_repeat())

    @retry_if_interrupted
    def running(self) -> list[int]:
        """Numbers of the trials that were asked for and not told."""
        states = (TrialState.RUNNING, TrialState.WAITING)
        return [t.number for t in self._study.get_trials(deepcopy=False, states=states)]

    def ask(self) -> Record:
        """The next trial of the search; it is stored whole or not at all.

        Raises:
            ConfigError: If what was proposed is no valid trial. It counts as a failed one.
        """
        try:
            proposal = propose(self.sweep, self._study, self._history)
            check_privacy_cap(self.sweep, proposal.config)
        except ConfigError as e:
            # It counts against the budget: a space that proposes nothing valid must come to an end.
            number = self.add_failed()
            raise ConfigError(f"trial {number} of the search is no valid config: {e}") from e
        return self._record(self._add(proposal.trial()))

    def learn_from(
        self, earlier: "Study", spent: tuple[float, float] | None, *, ex_post: bool = False
    ) -> None:
        """Tell the sampler, once and for all, what an earlier sweep found.

        Args:
            earlier: The earlier sweep.
            spent: Its epsilon and delta, those of its own earlier sweeps included; None if they are
                not known.
            ex_post: True if results chose how many runs there were.

        Raises:
            ConfigError: If that was another search.
        """
        records = earlier.records()
        told = collect_earlier_trials(self.sweep, earlier.sweep, records)
        before = earlier.warm_start
        sweeps = [*(before["sweeps"] if before else []), earlier.sweep.name]
        inherited = {
            "sweeps": sweeps,
            "trials": len(records),
            "void": earlier.is_void,
            "spent": spent,
            "ex_post": ex_post,
        }
        self._study.set_user_attr(_WARM, inherited)  # first: what is used is told of
        self._study.set_user_attr(_TOLD, told)

    @property
    def warm_start(self) -> dict[str, Any] | None:
        """sweeps, whose results the sampler knew, and trials that the last of them had run."""
        found: dict[str, Any] | None = self._study.user_attrs.get(_WARM)
        return found

    @cached_property
    def _history(self) -> list[FrozenTrial]:
        return make_history(self.sweep, self._study.user_attrs.get(_TOLD, []))

    def ask_to_confirm(self) -> Record | None:
        """The next repeat of one of the best configs, or the final run; stored before this returns.

        None if all have theirs. To be called when no trial of the search runs any more. A search
        that has not asked for all of its trials has thereby ended, whoever was to be repeated.
        """
        if self._has_second_part and self.num_to_ask():
            self._study.set_user_attr(_ENDED, self.sweep.config.budget.trials)
        self.store_choice()
        chosen = self._choose_next_repeat()
        if chosen is None:
            return None
        if self.sweep.config.confirm is None:
            config, kind = self.sweep.final(chosen.config), {"final": True}
        else:
            config, kind = make_repeat_config(chosen, self._list_repeats()), {}
        repeat = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            user_attrs=make_attributes(config, chosen.hyperparams, confirms=chosen.number, **kind),
        )
        return self._record(self._add(repeat))

    @property
    def _has_second_part(self) -> bool:
        """True if runs follow the search: repeats of the best, or a final run."""
        return self.sweep.config.confirm is not None or self.sweep.explores

    def _choose_next_repeat(self) -> Record | None:
        """Choose the trial whose config is to be repeated next, or trained finally."""
        config, records = self.sweep.config.confirm, self.records()
        if not self._has_second_part or not self._num_affordable():
            return None
        if config is None:
            return self._chosen_for_final(records)
        return find_next_repeat(self._ranking(records), self._list_repeats(), config)

    def _chosen_for_final(self, records: list[Record]) -> Record | None:
        """Choose the exploring trial whose config the final run gets; None once it was asked for.

        There is budget for one final run, so one that fails is not run again.
        """
        if any(record.final for record in records):
            return None
        return next(iter(self._ranking(records)), None)

    def _list_repeats(self) -> list[Record]:
        return [record for record in self.records() if record.confirms is not None]

    def _num_affordable(self) -> int:
        """Run that may still begin; a budget that all share is for as many as were planned.

        Of others more may be needed: a search that goes on can find others to be the best.
        """
        if self.sweep.search_budget is None:
            return sys.maxsize
        return max(0, self.sweep.num_runs - len(self.stored_trials()))

    def add_winner(self, record: Record, charged: dict[str, float]) -> None:
        """Store the one trial that a private selection tells of; it must have a row."""
        objective, row = self.sweep.config.objective, record.row
        assert row is not None, "a winner has reported"
        self._add(
            optuna.trial.create_trial(
                state=TrialState.COMPLETE,
                values=list(get_goal_values(objective, row, record.config) or ()),
                intermediate_values={int(row["epoch"]): row[objective.metric]},
                user_attrs=make_attributes(
                    record.config,
                    record.hyperparams,
                    row=row,
                    **{DISPATCHED: {"void": record.void, "charged": charged}},
                ),
            )
        )

    def add_failed(self) -> int:
        """Store a trial of which nothing is known but that it did not come to a result."""
        return self._add(optuna.trial.create_trial(state=TrialState.FAIL)).number

    @retry_if_interrupted
    def dispatch(self, record: Record, *, void: bool) -> Record:
        """Note that a trial's secret exists, and what the trial is charged.

        From now on its secret must never be drawn again, and it has spent its whole length.
        """
        if void:
            self.note_test_secret()
        charged = make_ledger_entry(record.config)
        self._storage.set_trial_user_attr(
            self._trial_id(record.number), DISPATCHED, {"void": void, "charged": charged}
        )
        return replace(record, void=void, dispatched=True, charged=charged)

    def note_test_secret(self) -> None:
        """Note that a trial used a test secret: no statement on the search holds any more."""
        self._study.set_user_attr(_VOID, True)

    @property
    def is_void(self) -> bool:
        """True if any trial used a test secret, or an earlier sweep that it learned from did."""
        warm = self.warm_start or {}
        return bool(self._study.user_attrs.get(_VOID)) or bool(warm.get("void"))

    @retry_if_interrupted
    def report(self, number: int, row: Row) -> Record | None:
        """Store a trial's report. None if the study knows a later one, or that it ended."""
        frozen = self._get_frozen_trial(number)
        known = frozen.user_attrs.get("row")
        if frozen.state.is_finished() or (known and row["epoch"] < known["epoch"]):
            return None
        record = self._record(frozen)
        if known and row["epoch"] == known["epoch"]:  # what was to follow from it may be missing
            return record
        value, trial_id = row[self.sweep.config.objective.metric], self._trial_id(number)
        self._storage.set_trial_intermediate_value(trial_id, int(row["epoch"]), value)
        self._storage.set_trial_user_attr(trial_id, "row", row)
        return replace(record, row=row, value=value)

    @retry_if_interrupted
    def should_prune(self, number: int) -> bool:
        """True if the trial does too badly to go on. A repeat goes on: its mean is to be fair."""
        frozen = self._get_frozen_trial(number)
        if "confirms" in frozen.user_attrs:
            return False
        return self._study.pruner.prune(self._study, frozen)

    @retry_if_interrupted
    def tell(self, number: int, end: TrialEnd, *, reason: str | None = None) -> Record:
        """End a trial. A complete one without a finite objective counts as failed."""
        frozen = self._get_frozen_trial(number)
        if frozen.state.is_finished():
            return self._record(frozen)
        record, objective = self._record(frozen), self.sweep.config.objective
        values = get_goal_values(objective, record.row, record.config)
        if end == "complete" and values is None:
            goals = " or ".join(objective.goals)
            end, reason = "failed", f"{goals} is not a finite number"
        if reason:
            self._storage.set_trial_user_attr(self._trial_id(number), "reason", reason)
        if end == "complete":  # Study.tell would read the trial three times more
            self._storage.set_trial_state_values(self._trial_id(number), _ENDS[end], values)
        else:
            self._study.tell(frozen.number, state=_ENDS[end])
        return self.record(number)

    @retry_if_interrupted
    def store_choice(self) -> None:
        """Compute and note by what the best config is chosen; to be called when the search ends.

        Noted, since the repeats and all that is reported must follow one choice, whoever reads it
        and on whichever machine. It counts until another trial is complete.
        """
        records = self.records()
        if any(r.expected is not None or r.margin is not None for r in records):
            return
        choice = make_choice(self.sweep, records)
        if choice.expected or choice.margin is not None:
            values = list(choice.expected.items())
            noted = {"trials": _complete(records), "values": values, "margin": choice.margin}
            self._study.set_user_attr(_CHOICE, noted)

    def best(self) -> list[Record]:
        """Complete trials of the search, the best first: by their repeats, where there are any.

        A complete final run comes before all of them: it is what they were run for.
        """
        return rank_best(self.records(), self.sweep.config.objective.sign)

    def curves(self) -> dict[int, Curve]:
        """The learning curve of every trial that has reported, by its number."""
        return {
            trial.number: tuple(sorted(trial.intermediate_values.items()))
            for trial in self.stored_trials()
            if trial.intermediate_values
        }

    def front(self) -> list[Record]:
        """Complete trials of the search that no other beats in every objective."""
        return find_pareto_front(self._ranking(self.records()), self.sweep.config.objective)

    def confirmed(self) -> dict[int, Confirmation]:
        """Summarize the repeats of the best configs, by trial."""
        return summarize_repeats(self.records())

    def _ranking(self, records: list[Record]) -> list[Record]:
        return rank_trials(records, self.sweep.config.objective.sign)

    def _add(self, trial: FrozenTrial) -> FrozenTrial:
        """Store a new trial, in one transaction."""
        # Study.ask would store the parameters one at a time, and a kill in between half a trial.
        trial_id = self._storage.create_new_trial(study_id(self._study), trial)
        return self._storage.get_trial(trial_id)

    def _get_frozen_trial(self, number: int) -> FrozenTrial:
        """One trial, at a cost that does not grow with the study."""
        return self._storage.get_trial(self._trial_id(number))

    def _trial_id(self, number: int) -> int:
        if number not in self._ids:
            self._ids[number] = self._storage.get_trial_id_from_study_id_trial_number(
                study_id(self._study), number
            )
        return self._ids[number]

    def _record(self, trial: FrozenTrial) -> Record:
        if trial.number not in self._configs:
            self._configs[trial.number] = TrialConfig.model_validate(trial.user_attrs["config"])
        return make_record(trial, self._configs[trial.number])


def _complete(records: Sequence[Record]) -> list[int]:
    """Numbers of the complete trials of the search."""
    return [r.number for r in records if r.state == "complete" and r.confirms is None]


def read_stored_sweep(name: str, state: StateFolder) -> ResolvedSweep:
    """The sweep as it was launched; StateError if there is none of this name."""
    file, base = state.sweep(name).read_files()
    return resolve_sweep(file, base)


def open_study(name: str, state: StateFolder, storage_uri: str | None = None) -> Study:
    """The study of a sweep, to read; driven by another process or by none.

    Args:
        storage_uri: Where its study is now, if not where it was launched.
    """
    folder = state.sweep(name)
    sweep = read_stored_sweep(name, state)
    return Study.open(storage_uri or folder.storage_uri, sweep, folder.id, name=folder.study)
