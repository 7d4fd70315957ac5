"""The driver's part in a sweep: what to run next, and what to make of what comes back.

It knows neither Ray nor MLflow. execution/ray_tune.py calls it with Tune's events; it tells the
study first, and then whoever watches. Watchers are told again after a crash.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from dpsweep.config.sweep import ResolvedSweep
from dpsweep.core.errors import ConfigError
from dpsweep.core.types import Row
from dpsweep.execution.bad_nodes import MAX_FAILURES, ListNodes, NodeFailures
from dpsweep.execution.failures import (
    Limits,
    find_cause_of_death,
    forget_failures,
    note_held,
    note_memory,
    read_begins,
    read_memory_notes,
)
from dpsweep.execution.resources import get_memory_share
from dpsweep.execution.worker import Assignment
from dpsweep.search.trial_record import Record
from dpsweep.store.lease import Lease
from dpsweep.store.state_dir import SweepFolder
from dpsweep.store.study import Study, TrialEnd
from dpsweep.training.schedule import resolve_trial_schedule
from dpsweep.training.trial_dir import TrialDir

_GRACE_SECONDS = 20.0
"""Longest that trials may take to save their state when they are asked to pause."""

MAX_WORKER_DEATHS = 3
"""Worker processes that may die with a trial; with one more it has failed."""

_ROUNDS = 4
"""Times that a trial is dispatched whose workers die before they begin it."""

_NEVER_BEGUN = (
    "worker processes die before they begin a trial: a node cannot start any, perhaps for want of "
    "disk or memory (its logs of Ray's tell): {}. Take that node out, and resume: nothing is lost"
)

_EQUAL_FAILURES, _EQUAL_LATER = 2, 4
"""Trials in a row that fail the same way before their first step, on the only node or on two, until
the sweep stops: the others would fail like them. The second number is for a sweep in which trials
have reported, so that some configs may be at fault and not all."""

_MOVE = "move"
"""A file in a trial's directory whose presence asks the trial to save its state and end."""

_DIED = "its worker process died again and again; the last time"


_KILLED_FOR_MEMORY = "killed due to the node running low on memory"
"""Said by Ray's memory monitor of a worker that it has chosen."""

_BY_RAY = "on its node, where Ray ended the worker"


class Watcher(Protocol):
    """Someone who wants to know how the trials fare: the tracker, the display."""

    def on_trial_start(self, record: Record) -> None:
        """A trial was given to a worker, for the first time or again."""

    def on_trial_report(self, record: Record, row: Row) -> None:
        """A trial reported `row`."""

    def on_trial_end(self, record: Record) -> None:
        """A trial is complete, pruned or failed."""


class Search(Protocol):
    """Search that a driver runs: a Study, or a SecretSearch, of which the winner alone is told."""

    sweep: ResolvedSweep
    holds_failures: bool
    """True if trials that fail before their first step may stop the search, and wait for a resume.
    A private selection must not tell how many trials began."""

    def admit(self, watchers: list[Watcher]) -> list[Watcher]:
        """Those of `watchers` that may know how its trials fare."""

    def running(self) -> list[int]:
        """Trials that were begun and have not ended."""

    def num_to_ask(self) -> int:
        """Trials still to begin."""

    def num_to_confirm(self) -> int:
        """Repeats of the best configs still to be run, at most."""

    def ask(self) -> Record:
        """The next trial; ConfigError if what was proposed is none. It counts as failed."""

    def ask_to_confirm(self) -> Record | None:
        """The next repeat of one of the best configs; None if all have theirs."""

    def record(self, number: int) -> Record:
        """One trial."""

    def dispatch(self, record: Record, *, void: bool) -> Record:
        """Note that a trial's secret exists, and what the trial is charged."""

    def report(self, number: int, row: Row) -> Record | None:
        """Take a trial's report. None if nothing is to follow from it."""

    def should_prune(self, number: int) -> bool:
        """True if a trial is to end early."""

    def tell(self, number: int, end: TrialEnd, *, reason: str | None = None) -> Record:
        """Take a trial's end."""

    def log(self, words: str) -> None:
        """Tell the user of a trouble that the search survives."""

    def describe_trouble(self, trouble: str) -> str:
        """Return what may be said of a trouble that stops the search."""

    def begin(self, reconcile: Callable[[], None]) -> None:
        """Tell the tracker, which `reconcile` does, what may be known before the next trial."""

    def publish(self, study: Study, reconcile: Callable[[], None]) -> None:
        """Tell study and tracker what may be known now that all trials have ended."""


class Driver:
    """Asks, reports and tells for one sweep. Trials are known by the id Tune gives them."""

    def __init__(
        self,
        search: Search,
        folder: SweepFolder,
        lease: Lease,
        watchers: list[Watcher],
        list_nodes: ListNodes = dict,
    ) -> None:
        self._search, self._folder, self._lease = search, folder, lease
        self._watchers = search.admit(watchers)
        self._live: dict[str, int] = {}
        self._pruned: set[str] = set()
        self._alone: list[int] = []
        self._runs_alone: str | None = None
        self._begun: dict[str, int] = {}
        self._rounds: Counter[int] = Counter()
        self._held: dict[int, str] = {}
        self._has_reports = False
        self._nodes = NodeFailures(list_nodes)
        self._moving: set[str] = set()
        self._last_death = "Ray does not say why"
        self._to_adopt = search.running()
        self._start = time.monotonic()
        self._stopped_at: float | None = None
        self.trouble: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune writes its arguments to disk for a restore that we never ask for."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Driver":
        """Itself, should Tune copy its arguments."""
        return self

    def num_left(self) -> int:
        """Trials still to be run, interrupted ones included."""
        waiting = len(self._to_adopt) + len(self._alone)
        return waiting + self._search.num_to_ask() + self._search.num_to_confirm()

    def stop(self) -> None:
        """Start nothing more, and ask the running trials to save their state and end."""
        if not self.stopping:
            self._stopped_at = time.monotonic()
            if not self._lease.is_lost():  # another driver would obey
                self._folder.stop_request.touch()

    @property
    def stopping(self) -> bool:
        """True once somebody, or trouble, asked for the end."""
        return self._stopped_at is not None

    @property
    def must_end(self) -> bool:
        """True once trials that were asked to pause have done so, or have had their time."""
        if self._stopped_at is None:
            return False
        return not self._live or time.monotonic() - self._stopped_at > _GRACE_SECONDS

    @property
    def is_waiting(self) -> bool:
        """True while trials run: what is run next may follow from them, or be one of them again."""
        return bool(self._live) and not self.stopping

    def assign_trial(self, trial_id: str) -> Assignment | None:
        """The trial to run as `trial_id`; None if there is none now. See `is_waiting`."""
        self._lease.check()
        record = self._next_record(trial_id)
        if record is None:
            return None
        trial_dir = TrialDir(self._folder.trial_dir(record.number))
        # The secret is on disk and the charge in the study before a worker can begin: whatever dies
        # after this, nothing is released without a charge.
        if not record.dispatched:
            trial_dir.make_secret()
            record = self._search.dispatch(record, void=trial_dir.is_void)
        self._live[trial_id] = record.number
        # Earlier assignments have begun the trial too: `ended` looks at the difference alone.
        move = trial_dir.path / _MOVE
        move.unlink(missing_ok=True)
        self._begun[trial_id] = len(read_begins(trial_dir.path))
        for watcher in self._watchers:
            watcher.on_trial_start(record)
        return {
            "number": record.number,
            "config": record.config.model_dump(mode="json"),
            "schedule": resolve_trial_schedule(record.config).to_json(),
            "trial_dir": str(trial_dir.path),
            "pause": [str(self._folder.stop_request), str(move)],
            "limits": self._make_limits(alone=trial_id == self._runs_alone).to_json(),
            "reported": record.row["epoch"] if record.row else 0,
        }

    def take_report(self, trial_id: str, payload: dict[str, Any]) -> bool:
        """Take one message of a worker. True if the trial is to end now."""
        self._lease.check()
        number = self._live.get(trial_id)
        row = payload.get("row")
        record = self._search.report(number, row) if number is not None and row else None
        if number is None or row is None or record is None:
            return False
        self._fail_held()
        self._has_reports = True
        self._nodes.note_report(self._find_node(number))
        for watcher in self._watchers:
            watcher.on_trial_report(record, row)
        # A trial at its last step is complete and fully charged: pruning would only lose it.
        if row["step"] < record.config.num_steps and self._search.should_prune(number):
            self._pruned.add(trial_id)
            return True
        return False

    def note_worker_death(self, trial_id: str, words: str) -> None:
        """A worker process died, and Tune has `words` on it; another one may be given the trial."""
        number = self._live.get(trial_id)
        if number is not None and _KILLED_FOR_MEMORY in words:
            note_memory(self._folder.trial_dir(number), _BY_RAY)
        lines = [line.strip() for line in words.splitlines() if line.strip()]
        self._last_death = lines[-1] if lines else self._last_death

    def end_trial(self, trial_id: str, payload: dict[str, Any] | None) -> None:
        """The worker is through with a trial, or (payload None) died too often."""
        self._lease.check()
        number, begun_before = self._live.pop(trial_id, None), self._begun.pop(trial_id, 0)
        if number is None:
            return
        if trial_id == self._runs_alone:
            self._runs_alone = None
        is_moving = trial_id in self._moving
        self._moving.discard(trial_id)
        if is_moving and payload and payload.get("end") == "paused" and not self.stopping:
            self._to_adopt.append(number)
            self._search.log(f"trial {number} saved its state on a node that is to end, and moves")
            return
        if payload and payload.get("end") == "memory" and not self.stopping:
            self._requeue(number, payload.get("reason", ""))
            return
        trial_dir = TrialDir(self._folder.trial_dir(number))
        begun = len(read_begins(trial_dir.path)) - begun_before
        # Where no worker could begin it (a full disk, say), the node is at fault, not the trial.
        its_fault = payload is not None or begun > MAX_WORKER_DEATHS
        if not (its_fault or self.stopping or trial_id in self._pruned):
            self._requeue_unstarted(number)
            return
        end, reason = self._decide_end(trial_id, trial_dir.path, payload)
        if end is None:  # it stays running in the study, and resume goes on with it
            self.trouble = reason or self.trouble
            self.stop()
            return
        if end == "failed" and not trial_dir.has_stepped:  # nothing was released
            if self._send_elsewhere(number, f"{reason}"):
                return
            self._hold(number, f"{reason}")
            return
        self._tell_end(number, end, reason)

    def _tell_end(self, number: int, end: TrialEnd, reason: str | None) -> None:
        # Before `tell`, by which a private selection deletes the directory: it must not come back.
        trial_dir = TrialDir(self._folder.trial_dir(number))
        record = self._search.tell(number, end, reason=reason)
        trial_dir.forget()
        for watcher in self._watchers:
            watcher.on_trial_end(record)

    def avoided_nodes(self, trial_id: str = "") -> frozenset[str]:
        """Nodes that no trial is placed on, or not the one that runs as `trial_id`."""
        return self._nodes.list_avoided(self._live.get(trial_id))

    @property
    def num_running(self) -> int:
        """Trials that were dispatched and have not ended."""
        return len(self._live)

    def move_from(self, nodes: Collection[str]) -> None:
        """Ask the trials on nodes that are to end to save their state; they go on elsewhere."""
        for trial_id, number in self._live.items() if nodes else ():
            if self._find_node(number) in nodes and trial_id not in self._moving:
                self._moving.add(trial_id)
                (self._folder.trial_dir(number) / _MOVE).touch()

    def _find_node(self, number: int) -> str:
        """Find the node on which the trial began last; empty if it never did."""
        return next(reversed(read_begins(self._folder.trial_dir(number))), "")

    def _send_elsewhere(self, number: int, reason: str) -> bool:
        """Run a trial that failed before its first step on another node; False if there is none."""
        node, avoided = self._find_node(number), self._nodes.list_avoided()
        if self.stopping or not self._nodes.note_failure(number, node):
            return False
        forget_failures(self._folder.trial_dir(number))  # or the next worker would obey them
        self._to_adopt.append(number)
        host = self._nodes.describe(node)
        self._search.log(
            f"trial {number} failed before its first step on {host}, and runs on another: {reason}"
        )
        if self._nodes.list_avoided() - avoided:
            self._search.log(f"{host} is avoided: {MAX_FAILURES} trials failed there so")
        return True

    def _hold(self, number: int, reason: str) -> None:
        """Keep a trial that failed before its first step as running; stop if others fail like it.

        It has released nothing, so `resume` may run it again with the secret that it has.
        """
        trial_dir = self._folder.trial_dir(number)
        again = not note_held(trial_dir)  # and whoever resumed the sweep has not mended it
        if again or not self._search.holds_failures:
            self._tell_end(number, "failed", reason)
            return
        self._held[number] = reason
        forget_failures(self._folder.trial_dir(number))  # or the next worker would obey them
        told = Counter(  # a reason may name the trial's own folder
            why.replace(str(self._folder.trial_dir(n)), "") for n, why in self._held.items()
        )
        num_equal = max(told.values())
        if num_equal >= (_EQUAL_LATER if self._has_reports else _EQUAL_FAILURES):
            self.trouble = (
                f"{num_equal} trials failed the same way before their first step: "
                f"{reason.rstrip('.')}. The others would fail too. Nothing was released. Mend "
                f"that, and go on with: dpsweep resume {self._folder.called}"
            )
            self.stop()

    def _fail_held(self) -> None:
        """End the trials that are held as failed: others do not fail like them."""
        held, self._held = self._held, {}
        for number, reason in held.items():
            self._tell_end(number, "failed", reason)

    def _decide_end(
        self, trial_id: str, trial_dir: Path, payload: dict[str, Any] | None
    ) -> tuple[TrialEnd | None, str | None]:
        """Decide how a trial ended, and why if it failed; None if it did not end."""
        if trial_id in self._pruned:
            return "pruned", None
        if payload is None:
            died = f"{_DIED}: {find_cause_of_death(trial_dir)}"
            return (None, None) if self.stopping else ("failed", died)
        match payload.get("end"):
            case "paused" | "halted":
                return None, payload.get("reason")
            case "memory":  # and the sweep stops: whoever resumes it runs the trial again
                return None, None
            case None:
                return (None, None) if self.stopping else ("failed", "it ended without a result")
            case end:
                return end, payload.get("reason")

    def _requeue_unstarted(self, number: int) -> None:
        """Hands a trial out again whose workers died before they began it: no fault of its own.

        If that was in vain too often the sweep stops, and `resume` goes on with the trial.
        """
        self._rounds[number] += 1
        if self._rounds[number] < _ROUNDS:
            self._to_adopt.append(number)
        else:
            # They had not read any data, so what Ray says of them tells nothing of those.
            self.trouble = _NEVER_BEGUN.format(self._last_death)
            self.stop()

    def _requeue(self, number: int, reason: str) -> None:
        """Note that a trial is to be run once more, when no other runs."""
        self._alone.append(number)
        self._search.log(
            f"trial {number}: {reason}; it is run once more, alone and with half the examples at "
            f"once"
        )

    def _make_limits(self, *, alone: bool) -> Limits:
        config = self._search.sweep.config
        return Limits(
            silence_seconds=config.budget.silence_seconds,
            memory_bytes=config.resources.memory_bytes,
            gpu_share=1.0 if alone else get_memory_share(config.resources),
            num_devices=config.resources.num_devices,
            alone=alone,
        )

    def _next_record(self, trial_id: str) -> Record | None:
        if self.stopping or self._runs_alone:
            return None
        while self._to_adopt:
            number = self._to_adopt.pop(0)
            if not read_memory_notes(self._folder.trial_dir(number)):
                return self._search.record(number)
            # Memory ran out under an earlier process: it waits until no other trial runs.
            self._alone.append(number)
        while not self._is_late() and self._search.num_to_ask():
            try:
                return self._search.ask()
            except ConfigError as e:
                self._search.log(str(e))
        if self._alone and not self._live:
            self._runs_alone = trial_id
            return self._search.record(self._alone.pop(0))
        if not self._live:
            self._fail_held()
        # Whose config is repeated depends on the ranking, so repeats wait for the search to end.
        unfinished = [*self._live.values(), *self._alone]
        searching = [n for n in unfinished if self._search.record(n).confirms is None]
        return None if searching else self._search.ask_to_confirm()

    def _is_late(self) -> bool:
        hours = self._search.sweep.config.budget.hours
        return hours is not None and time.monotonic() - self._start >= 3600 * hours
