"""What a sweep's trials have spent together, and the sentences that say so."""

import math
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
        proven=_basic(len(runs), trial.privacy.epsilon, delta)
        if adaptive and _vary(sweep)
        else None,
        void=void,
    )
    return search_statement(
        search, accounting=sweep.config.accounting, num_held_out=trial.data.num_held_out
    )


def _vary(sweep: Sweep) -> bool:
    """True if the search chooses sampling rates or lengths, and with them the noise."""
    return len({steps_and_rate(config) for config in sweep.corners()}) > 1


def _basic(num_trials: int, promised: float | None, delta: float) -> tuple[float, float]:
    """Basic composition of so many trials; (inf, 1) where none of them promised an epsilon.

    Composing privacy loss distributions assumes that they were fixed beforehand. Where a
    search chooses among them by earlier results, what is fixed is each trial's promise.
    """
    if promised is None:
        return math.inf, 1.0
    return num_trials * promised, min(1.0, num_trials * delta)
