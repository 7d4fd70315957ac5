"""What a sweep's trials have spent together, and the sentences that say so."""

from collections.abc import Sequence

from dpsweep.config.sweep import Sweep
from dpsweep.privacy.accounting import Run, compose
from dpsweep.privacy.statement import Search, search_statement
from dpsweep.train.budget import budget, delta_of, steps_and_rate
from dpsweep.train.promise import trial_promise
from dpsweep.tune.study import Record


def run_of(record: Record) -> Run:
    """The run a trial is charged for: its whole length, even if it ended early."""
    steps, rate = steps_and_rate(record.config)
    if record.row:
        return Run(rate, record.row["noise_multiplier"], steps)
    return budget(record.config).run


def statement(record: Record) -> str:
    """The promise of one trial that has reported."""
    spent = run_of(record)
    epsilon = record.config.privacy.epsilon or spent.epsilon(delta_of(record.config))
    return trial_promise(record.config, epsilon, spent.noise_multiplier, record.void)


def search_promise(sweep: Sweep, runs: Sequence[Run], *, void: bool = False) -> str:
    """The sentences for the search as a whole; `void` if a trial used a test secret."""
    trial, delta = sweep.promise, delta_of(sweep.promise)
    adaptive = sweep.config.sampler.name == "tpe" or sweep.config.stop.name != "none"
    search = Search(
        num_trials=len(runs),
        epsilon=compose(runs, delta),
        delta=delta,
        adaptive=adaptive,
        proven=_basic(runs, trial.privacy.epsilon, delta) if adaptive else None,
        void=void,
    )
    return search_statement(
        search, accounting=sweep.config.accounting, num_held_out=trial.data.num_held_out
    )


def _basic(runs: Sequence[Run], promised: float | None, delta: float) -> tuple[float, float] | None:
    """Basic composition, where the runs differ.

    Composing privacy loss distributions assumes that they were fixed beforehand. Where a
    search chooses among them by earlier results, what is fixed is each trial's promise.
    """
    if len(set(runs)) < 2:
        return None
    each = promised or max(run.epsilon(delta) for run in set(runs))
    return len(runs) * each, min(1.0, len(runs) * delta)
