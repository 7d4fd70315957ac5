"""How the trials of a search went, epoch by epoch."""

from dpsweep.store.study import Study

Curve = tuple[tuple[int, float], ...]
"""(epoch, objective) at each report, by epoch."""


def curves(study: Study) -> dict[int, Curve]:
    """The learning curve of every trial that has reported, by its number."""
    return {
        trial.number: tuple(sorted(trial.intermediate_values.items()))
        for trial in study.stored_trials()
        if trial.intermediate_values
    }
