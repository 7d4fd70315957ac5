"""A sweep while it runs: a live panel, or plain lines where there is no terminal.

One view for both who look: the driver's own screen, which is told of each event, and `watch` in
another terminal, which reads the study and writes nothing. Of a private selection they tell that it
runs, and nothing else before its end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dpsweep.core.progress import format_duration
from dpsweep.core.types import Row
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.tables import (
    best_words,
    format_budgets,
    format_hyperparams,
    main_metric,
    num_trials_and_repeats,
    panel_table,
    repeated_words,
    run_words,
    running_table,
)
from dpsweep.search.confirmation import summarize_repeats
from dpsweep.search.trial_record import Record
from dpsweep.store.lease import LeaseHolder
from dpsweep.store.study import Study

_BAR_WIDTH = 60

_LAST = 5
"""Trials that ended last, shown under those that run."""


class LiveView:
    """State of a sweep as it is drawn. A watcher of the driver.

    Args:
        owner: Who drives the sweep; None for this process.
    """

    def __init__(
        self, study: Study, console: Console, owner: Callable[[], LeaseHolder | None] | None = None
    ) -> None:
        self.console = console
        self.driver: LeaseHolder | None = None
        self._study, self._owner = study, owner
        self._disclosure = disclosure_of(study.sweep)
        self._records: dict[int, Record] = {}
        self._best: Record | None = None
        self.look()
        self._told = {r.number for r in self._ended()}

    @property
    def is_driven(self) -> bool:
        """True while a process drives the sweep."""
        return self._owner is None or self.driver is not None

    def look(self) -> bool:
        """Read everything again. False once nobody drives the sweep."""
        if self._owner:
            self.driver = self._owner()  # first: what it wrote before it ended is then seen
        if self._disclosure.tells_trials or not self.is_driven:
            self._records = {record.number: record for record in self._study.records()}
            self._best = next(iter(self._study.best()), None)
        return self.is_driven

    def on_trial_start(self, record: Record) -> None:
        """A trial runs."""
        self._records[record.number] = record

    def on_trial_report(self, record: Record, row: Row) -> None:
        """A trial has new figures."""
        self._records[record.number] = record

    def on_trial_end(self, record: Record) -> None:
        """A trial is through."""
        self._records[record.number] = record
        self._best = next(iter(self._study.best()), None)
        if not self.console.is_terminal:
            self.print_lines()

    def print_lines(self) -> None:
        """Print a line for each trial that ended since this was last called."""
        if not self._disclosure.tells_trials:
            return
        new = [record for record in self._ended() if record.number not in self._told]
        for record in new:
            self._told.add(record.number)
            line = f"[{len(self._told)}/{self._study.sweep.num_runs}] {self._line(record)}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """The whole sweep in a line."""
        sweep, best = self._study.sweep, self._best
        if not self._disclosure.tells_trials:
            if self.is_driven:
                return f"{sweep.name}: runs; a private selection tells nothing before its end"
            return f"{sweep.name}: {best_words(best) if best else 'ended without a winner'}"
        running = len(self._running()) if self.is_driven else 0
        repeats = summarize_repeats(list(self._records.values())).get(best.number) if best else None
        return (
            f"{sweep.name}: {self._done()}, {running} running, {best_words(best, repeats)}, ε "
            f"{format_budgets(sweep.epsilons)} a {sweep.written.privacy.scope}{self._time_left()}"
        )

    def farewell(self) -> str:
        """Compose the last line, once nobody drives the sweep any more."""
        name = self._study.sweep.name
        if self._study.is_finished():
            return f"{name} is finished. See: dpsweep best {name}, dpsweep report {name}"
        return f"{name} is not driven by anybody. Go on with: dpsweep resume {name}"

    def __rich__(self) -> Group:
        """The live panel."""
        head = [Text(self.summary(), style="bold")]
        if not self._disclosure.tells_trials:
            return Group(*head)
        if self.driver:
            head.append(Text(f"driven by {self.driver}"))
        end = Text()  # rich's bar does not end its line
        return Group(*head, self.bar(), end, *self.tables())

    @property
    def num_ended(self) -> int:
        """Runs that have ended, repeats among them."""
        return len(self._ended())

    def tables(self) -> tuple[Table, Table]:
        """The runs that go on, and those that ended last; empty ones of a private selection."""
        return running_table(self._running()), self._last_table()

    def _running(self) -> list[Record]:
        return [r for r in self._records.values() if r.state == "running"]

    def _ended(self) -> list[Record]:
        return [r for r in self._records.values() if r.state != "running"]

    def _done(self) -> str:
        sweep = self._study.sweep
        trials = sweep.config.budget.trials
        ended = num_trials_and_repeats(self._ended())
        return run_words(*ended, trials, sweep.num_runs - trials, explores=sweep.explores)

    def _time_left(self) -> str:
        """Estimate of the time left; the driver's screen and any other make the same one."""
        running = self._running()
        times = [r.seconds for r in self._ended() if r.seconds]
        if not times:  # from the epochs that the first trials have behind them
            paces = [(r.seconds / r.row["epoch"], r.config.train.epochs) for r in running if r.row]
            times = [pace * epochs for pace, epochs in paces]
        if not (times and running and self.is_driven):
            return ""
        each = sum(times) / len(times)
        done = len(self._ended()) * each + sum(min(r.seconds, each) for r in running)
        left = (self._study.sweep.num_runs * each - done) / len(running)
        return f", about {format_duration(left)} left"

    def bar(self) -> ProgressBar:
        """Share of the planned runs that has ended, with the epochs of those that run."""
        begun = sum(r.row["epoch"] / r.config.train.epochs for r in self._running() if r.row)
        ended = len(self._ended()) + begun
        return ProgressBar(total=self._study.sweep.num_runs, completed=ended, width=_BAR_WIDTH)

    def _last_table(self) -> Table:
        table = panel_table("ended", "state", "result", "searched")
        for record in self._ended()[-_LAST:][::-1]:
            value = "–" if record.value is None else f"{record.value:.4f}"
            table.add_row(str(record.number), record.state, value, Text(format_hyperparams(record)))
        return table

    def _line(self, record: Record) -> str:
        figures = record.reason or "for no known reason"
        if record.row and record.state != "failed":
            main = main_metric([record])
            figures = f"{main} {record.row[f'valid/{main}']:.4f}"
            metric = self._study.sweep.config.objective.metric
            if metric != f"valid/{main}" and record.value is not None:
                figures += f", {metric} {record.value:.4f}"
        return (
            f"trial {record.number}{repeated_words(record)} {record.state}: {figures}, "
            f"{format_hyperparams(record)} ({record.seconds:.1f} s)"
        )


@contextmanager
def show_live(view: LiveView) -> Iterator[None]:
    """Draw the panel four times a second, where there is a terminal."""
    if not view.console.is_terminal:
        yield
        return
    with Live(
        get_renderable=view.__rich__, console=view.console, refresh_per_second=4, transient=True
    ):
        yield


def follow_sweep(view: LiveView, pause: Callable[[], bool]) -> None:
    """Show a sweep until nobody drives it, or `pause` says that it is enough.

    Args:
        view: The sweep.
        pause: Waits a little; True to leave.
    """
    if view.is_driven:
        if not view.console.is_terminal:
            view.console.print(view.summary(), markup=False)
        with show_live(view):
            while not pause() and view.look():
                if not view.console.is_terminal:
                    view.print_lines()
        if view.is_driven:
            return
    if not view.console.is_terminal:
        view.print_lines()
    view.console.print(view.summary(), markup=False)
    view.console.print(view.farewell(), markup=False)
