"""What a sweep shows while it runs: a live panel, or plain lines where there is no terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dpsweep.core.types import Row
from dpsweep.execution.launch import Session
from dpsweep.results.tables import (
    best_words,
    knob_words,
    repeated_words,
    running_table,
    shown_budgets,
)
from dpsweep.search.trial_record import Record


class Progress:
    """Counts trials, and draws them. A watcher of the driver."""

    def __init__(self, session: Session, console: Console) -> None:
        self.console = console
        self._config = session.sweep.config
        self._promise = session.sweep.written.privacy
        self._epsilons = shown_budgets(session.sweep.epsilons)
        self._running: dict[int, Record] = {}
        self._ended = {r.number: r for r in session.study.records() if r.state != "running"}
        self._before, self._total = len(self._ended), session.sweep.num_runs
        self._best = next(iter(session.study.best()), None)
        self._start = time.monotonic()

    def started(self, record: Record) -> None:
        """A trial runs."""
        self._running[record.number] = record

    def reported(self, record: Record, row: Row) -> None:
        """A trial has new figures."""
        self._running[record.number] = record

    def ended(self, record: Record) -> None:
        """A trial is through."""
        self._running.pop(record.number, None)
        self._ended[record.number] = record
        searched = record.confirms is None and self._beats_best(record)
        if record.state == "complete" and (record.final or searched):
            self._best = record
        if not self.console.is_terminal:
            line = self._line(record)
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __rich__(self) -> Group:
        """The live panel."""
        running = running_table(self._running.values())
        return Group(Text(self._summary(), style="bold"), running)

    def _summary(self) -> str:
        done, total = len(self._ended), self._total
        return (
            f"{self._config.name}: {done}/{total} trials, {len(self._running)} running, "
            f"{best_words(self._best)}, ε {self._epsilons} a {self._promise.scope}, {self._time()}"
        )

    def _time(self) -> str:
        passed = time.monotonic() - self._start
        done = len(self._ended) - self._before
        if not done:
            return f"{passed:.0f} s"
        left = (self._total - len(self._ended)) * passed / done
        return f"{passed:.0f} s, about {left:.0f} s left"

    def _line(self, record: Record) -> str:
        figures = record.reason or "for no known reason"
        if record.row and record.state != "failed":
            figures = f"accuracy {record.row['valid/accuracy']:.4f}"
        return (
            f"[{len(self._ended)}/{self._total}] trial {record.number}{repeated_words(record)} "
            f"{record.state}: {figures}, {knob_words(record)} ({record.seconds:.1f} s)"
        )

    def _beats_best(self, record: Record) -> bool:
        if self._best is None or self._best.value is None or record.value is None:
            return True
        sign = self._config.objective.sign
        return sign * record.value < sign * self._best.value


@contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Draws the panel four times a second, where there is a terminal."""
    if not progress.console.is_terminal:
        yield
        return
    with Live(
        get_renderable=progress.__rich__,
        console=progress.console,
        refresh_per_second=4,
        transient=True,
    ):
        yield
