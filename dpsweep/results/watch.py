"""A sweep that another process drives, as it is seen in its study: read, and never written.

Of a private selection it is told that it runs, and nothing else, before its end.
"""

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dpsweep.results.tables import (
    best_words,
    knob_words,
    panel_table,
    repeated_words,
    running_table,
    shown_budgets,
)
from dpsweep.search.trial_record import Record
from dpsweep.store.lease import LeaseHolder
from dpsweep.store.study import Study

_LAST = 5
"""Trials that ended last, shown under those that run."""


class Watch:
    """What is known of the sweep, read anew by `look`.

    Args:
        study: Its study.
        owner: Who drives it now; None if nobody does.
        console: Where it is shown.
    """

    def __init__(
        self, study: Study, owner: Callable[[], LeaseHolder | None], console: Console
    ) -> None:
        self.console = console
        self.driver: LeaseHolder | None = None
        self._study, self._owner = study, owner
        self._records: list[Record] = []
        self._best: Record | None = None
        self._told: set[int] = set()
        self._began = time.monotonic()
        self._ended_before: int | None = None

    def look(self) -> bool:
        """Reads everything again. False once nobody drives the sweep."""
        self.driver = self._owner()  # first: what it wrote before it ended is then seen
        if not self._study.sweep.is_private_selection or self.driver is None:
            self._records = self._study.records()
            self._best = next(iter(self._study.best()), None)
        if self._ended_before is None:
            self._ended_before = len(self._ended())
            self._told = {r.number for r in self._ended()}
        return self.driver is not None

    def lines(self) -> list[str]:
        """A line for each trial that ended since this was last asked."""
        if self._study.sweep.is_private_selection:
            return []
        new = [r for r in self._ended() if r.number not in self._told]
        self._told |= {r.number for r in new}
        return [self._line(record) for record in new]

    def summary(self) -> str:
        """The whole sweep in a line."""
        name, sweep = self._study.sweep.name, self._study.sweep
        if sweep.is_private_selection and self.driver:
            return f"{name}: runs; a private selection tells nothing before its end"
        ended, best = len(self._ended()), self._best
        running = sum(r.state == "running" for r in self._records) if self.driver else 0
        if sweep.is_private_selection:
            return f"{name}: {best_words(best) if best else 'ended without a winner'}"
        return (
            f"{name}: {ended}/{sweep.num_runs} trials, {running} running, {best_words(best)}, "
            f"ε {shown_budgets(sweep.epsilons)} a {sweep.written.privacy.scope}{self._left(ended)}"
        )

    def farewell(self) -> str:
        """What is said once nobody drives the sweep any more."""
        name = self._study.sweep.name
        if self._study.is_finished():
            return f"{name} is finished. See: dpsweep best {name}, dpsweep report {name}"
        return f"{name} is not driven by anybody. Go on with: dpsweep resume {name}"

    def __rich__(self) -> Group:
        """The live panel."""
        head = Text(self.summary(), style="bold")
        if self._study.sweep.is_private_selection:
            return Group(head)
        running = [r for r in self._records if r.state == "running"]
        return Group(
            head, Text(f"driven by {self.driver}"), running_table(running), self._last_table()
        )

    def _ended(self) -> list[Record]:
        return [r for r in self._records if r.state != "running"]

    def _left(self, ended: int) -> str:
        done = ended - (self._ended_before or 0)
        if not (done and self.driver):
            return ""
        passed = time.monotonic() - self._began
        return f", about {(self._study.sweep.num_runs - ended) * passed / done:.0f} s left"

    def _last_table(self) -> Table:
        table = panel_table("ended", "state", "result", "searched")
        for record in self._ended()[-_LAST:][::-1]:
            value = "–" if record.value is None else f"{record.value:.4f}"
            table.add_row(str(record.number), record.state, value, Text(knob_words(record)))
        return table

    def _line(self, record: Record) -> str:
        value = "" if record.value is None else f"{self._study.sweep.config.objective.metric} "
        value += record.reason or ("–" if record.value is None else f"{record.value:.4f}")
        repeated = repeated_words(record)
        return f"trial {record.number}{repeated} {record.state}: {value}, {knob_words(record)}"


def followed(seen: Watch, pause: Callable[[], bool]) -> None:
    """Shows a sweep until nobody drives it, or `pause` says that it is enough.

    Args:
        seen: The sweep.
        pause: Waits a little; True to leave.
    """
    if not seen.look():
        seen.console.print(seen.summary(), markup=False)
        seen.console.print(seen.farewell(), markup=False)
        return
    if seen.console.is_terminal:
        _live(seen, pause)
    else:
        seen.console.print(seen.summary(), markup=False)
        while not pause() and seen.look():
            _print_lines(seen)
    if seen.driver is None:
        _print_lines(seen) if not seen.console.is_terminal else None
        seen.console.print(seen.summary(), markup=False)
        seen.console.print(seen.farewell(), markup=False)


def _live(seen: Watch, pause: Callable[[], bool]) -> None:
    with Live(
        get_renderable=seen.__rich__, console=seen.console, refresh_per_second=2, transient=True
    ):
        while not pause() and seen.look():
            pass


def _print_lines(seen: Watch) -> None:
    for line in seen.lines():
        seen.console.print(line, markup=False, highlight=False, soft_wrap=True)
