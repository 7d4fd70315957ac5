"""A search by private selection: its trials are nobody's to see, but for the one that wins.

What is charged is a geometric number of like, random trials of which the best alone is released
(privacy/search_budget.py). So how many there are is drawn in secret, and so is the key that their
configs are drawn by; a trial that ends is compared with the best so far, and one of the two is
deleted. Nothing reaches the study, the tracker or the screen before the end, and then the winner
does, as trial 0. How long the search took can still be seen by whoever watches the machine.
"""

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dpsweep.config.space.suggest import RandomDraw
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.disk import delete_written, write_atomically
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Row
from dpsweep.execution.driver import Watcher
from dpsweep.execution.failures import BEGUN
from dpsweep.execution.tracking import CHECKS
from dpsweep.privacy.search_budget import draw_num_trials
from dpsweep.search.charge import check_privacy_cap, make_ledger_entry
from dpsweep.search.objectives import get_goal_values
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import SweepFolder
from dpsweep.store.study import Study, TrialEnd
from dpsweep.training.trial_dir import TrialDir

_FILE = "selection.json"
_MOST_DRAWS = 10_000


@dataclass
class _Ledger:
    """Progress that a driver needs to take over; on disk, for its owner alone."""

    length: int  # trials in all
    key: str  # what their configs follow from, in hex
    asked: int = 0  # trials that were begun
    running: list[int] = field(default_factory=list)  # those that did not end yet
    # those whose secret was drawn, by number; True where it is a test's
    dispatched: dict[str, bool] = field(default_factory=dict)
    winner: int | None = None  # the best so far
    cost: float = math.inf  # its objective, small being good


class SecretSearch:
    """The trials of a private selection: a driver.Search whose trials only its driver knows."""

    holds_failures = False

    def __init__(self, folder: SweepFolder, sweep: ResolvedSweep) -> None:
        self.sweep, self._folder = sweep, folder
        self._key_of = folder.path / _FILE
        self._draw_trial: dict[int, tuple[TrialConfig, dict[str, Any]]] = {}
        if self._key_of.exists():
            self._ledger = _Ledger(**json.loads(self._key_of.read_text()))
        else:
            self._check_not_released()
            length = draw_num_trials(sweep.num_runs, Secret.draw().stream(0, "sample"))
            self._ledger = _Ledger(length, Secret.draw().key.hex())
            self._save()
        self._delete_losers()

    def _check_not_released(self) -> None:
        """Raise StateError if a selection ended here that the study does not know of."""
        if any((self._folder.path / "trials").iterdir()):
            raise StateError(
                f"{self._folder.path}: holds the trial of a private selection that has ended, and "
                f"the study does not know it: its database is older. Fresh trials would release a "
                f"second winner under one epsilon. Put the newer database back, or launch the "
                f"sweep under another name"
            )

    def admit(self, watchers: list[Watcher]) -> list[Watcher]:
        """Nobody: the number of trials is a secret, and so is how each does."""
        return []

    def log(self, words: str) -> None:
        """Say nothing: how often something is said tells the number of trials."""

    def describe_trouble(self, trouble: str) -> str:
        """Leave out the trial directory: its number tells how far the search is."""
        return "the disk is full; free some space, and resume"

    def begin(self, reconcile: Callable[[], None]) -> None:
        """Tell nothing: beside its end, when it began tells how long it is."""

    def running(self) -> list[int]:
        """Trials that were begun and have not ended."""
        return list(self._ledger.running)

    def num_to_ask(self) -> int:
        """Trials still to begin."""
        return self._ledger.length - self._ledger.asked

    def num_to_confirm(self) -> int:
        """None: repeats would tell more than the winner."""
        return 0

    def ask_to_confirm(self) -> None:
        """None is left."""

    def ask(self) -> Record:
        """The next trial.

        Raises:
            ConfigError: If no point that the sweep admits was found for it; it is spent.
        """
        number = self._ledger.asked
        self._ledger.asked += 1
        try:
            record = self.record(number)
            self._ledger.running.append(number)
        finally:
            self._save()
        return record

    def record(self, number: int) -> Record:
        """A trial as the driver has to know it: its config, and nothing of how it does."""
        config, hyperparams = self._config(number)
        void = self._ledger.dispatched.get(str(number))
        return Record(
            number=number,
            state="running",
            config=config,
            hyperparams=hyperparams,
            row=None,
            value=None,
            reason=None,
            void=bool(void),
            dispatched=void is not None,
        )

    def dispatch(self, record: Record, *, void: bool) -> Record:
        """Note that the trial's secret exists."""
        self._ledger.dispatched[str(record.number)] = void
        self._save()
        return replace(record, void=void, dispatched=True)

    def report(self, number: int, row: Row) -> None:
        """None: how a trial does is kept in its directory."""
        return None

    def should_prune(self, number: int) -> bool:
        """False: all trials are alike."""
        return False

    def tell(self, number: int, end: TrialEnd, *, reason: str | None = None) -> Record:
        """Compare a trial that ended with the best so far, and delete the lesser of the two."""
        record, ledger = self.record(number), self._ledger
        if number in ledger.running:
            ledger.running.remove(number)
            rows = TrialDir(self._folder.trial_dir(number)).rows() if end == "complete" else []
            cost = self._cost(record.config, rows[-1]) if rows else math.inf
            best = math.inf if ledger.winner is None else ledger.winner
            if (cost, number) < (ledger.cost, best) and cost < math.inf:  # ties: of like trials,
                ledger.winner, ledger.cost = number, cost  # the first is as random as any
            self._save()
        self._delete_losers()
        return replace(record, state=end)

    def publish(self, study: Study, reconcile: Callable[[], None]) -> None:
        """Tell the study who won, as its one trial, and forget how it came about."""
        winner, first = self._ledger.winner, self._folder.trial_dir(0)
        if any(self._ledger.dispatched.values()):
            study.note_test_secret()
        if study.num_asked() == 0 and winner is None:
            study.add_failed()
        elif study.num_asked() == 0 and winner is not None:
            if (trial_dir := self._trial_dir_of(winner)) != first:
                shutil.rmtree(first, ignore_errors=True)
                trial_dir.rename(first)
            found = TrialDir(first)
            found.forget()  # its driver may have died before it did
            rows = [row | {"seconds": 0.0} for row in found.rows()]  # they tell of secret batches
            found.save_rows(rows)
            study.add_winner(
                replace(self.record(winner), row=rows[-1]),
                make_ledger_entry(self._config(winner)[0]),
            )
        forget(self._folder)
        self._hide_times()
        reconcile()

    def _hide_times(self) -> None:
        """Set the times of all files to now.

        When the winner ended tells how many trials there were, and MLflow keeps the times of files
        that it copies to a folder.
        """
        delete_written(self._folder.trial_dir(0) / BEGUN)
        now = time.time()
        trials = (self._folder.path / "trials").rglob("*")
        for place in (*trials, self._folder.path / "sweep.yaml", self._folder.path / CHECKS):
            if place.exists():
                os.utime(place, (now, now))

    def _cost(self, config: TrialConfig, row: Row) -> float:
        objective = self.sweep.config.objective
        values = get_goal_values(objective, row, config)
        if values is None:
            return math.inf
        return objective.sign * values[0]

    def _config(self, number: int) -> tuple[TrialConfig, dict[str, Any]]:
        """A random point of the space among those that the sweep admits; the same each time."""
        if number not in self._draw_trial:
            rng = random.Random(f"{self._ledger.key}/{number}")
            draws = (self._try_draw(RandomDraw(rng)) for _ in range(_MOST_DRAWS))
            found = next(filter(None, draws), None)
            if found is None:
                raise ConfigError(
                    f"search: none of {_MOST_DRAWS} random points is a valid trial that meets "
                    f"every condition. Loosen `where`, or narrow the ranges"
                )
            self._draw_trial[number] = found
        return self._draw_trial[number]

    def _try_draw(self, draw: RandomDraw) -> tuple[TrialConfig, dict[str, Any]] | None:
        try:
            tree, hyperparams = self.sweep.space.draw(self.sweep.base.tree, draw)
            config = self.sweep.trial(tree)
            check_privacy_cap(self.sweep, config)
        except ConfigError:
            return None
        return (config, hyperparams) if self.sweep.admits(config) else None

    def _delete_losers(self) -> None:
        kept = {self._folder.trial_dir(number) for number in self._ledger.running}
        if self._ledger.winner is not None:
            kept.add(self._trial_dir_of(self._ledger.winner))
        for trial_dir in (self._folder.path / "trials").iterdir():
            if trial_dir not in kept:
                shutil.rmtree(trial_dir)

    def _trial_dir_of(self, winner: int) -> Path:
        """Its own or, if its driver died after that was moved, that of trial 0."""
        trial_dir = self._folder.trial_dir(winner)
        return trial_dir if trial_dir.exists() else self._folder.trial_dir(0)

    def _save(self) -> None:
        write_atomically(self._key_of, json.dumps(asdict(self._ledger)).encode())


def forget(folder: SweepFolder) -> None:
    """Delete what only an unfinished selection needs: how long it is, and what it draws by."""
    delete_written(folder.path / _FILE)
