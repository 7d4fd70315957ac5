"""A study as a sampler or a pruner is to see it: which of its trials, and a pad for notes.

Trials at one epsilon say little about another, repeats of a chosen config are no search, and an
earlier sweep's trials are no trials of this one. So samplers and pruners never see the study
itself, but a part of it (compat.restrict_study).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from optuna.trial import FrozenTrial

from dpsweep.config.keys import EPSILON
from dpsweep.search.trial_record import HYPERPARAMS


class AttributeBuffer:
    """Keeps what a sampler would write to its trial, until the proposal is taken."""

    def __init__(self) -> None:
        self.attrs: dict[str, Any] = {}  # system attributes of the trial

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Note an attribute."""
        self.attrs[key] = value


def list_search_trials(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Trials of the search: all but the repeats that confirm a chosen one."""
    return [t for t in trials if t.user_attrs.get("confirms") is None]


def list_comparable_trials(
    trials: Iterable[FrozenTrial], hyperparams: Mapping[str, Any]
) -> list[FrozenTrial]:
    """Trials that were proposed, with the same epsilon as a trial with these hyperparameters."""
    return [
        t
        for t in list_search_trials(trials)
        if HYPERPARAMS in t.user_attrs
        and t.user_attrs[HYPERPARAMS].get(EPSILON) == hyperparams.get(EPSILON)
    ]
