"""A study as a sampler or a pruner is to see it: some of the trials, and a pad for notes.

Trials at one epsilon say little about another, repeats of a chosen config are no search, and an
earlier sweep's trials are no trials of this one. So samplers and pruners never see the study
itself, but a view of it.
"""

import copy
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

EPSILON_KEY = "privacy.epsilon"


class Notes:
    """Keeps what a sampler would write to its trial, until the proposal is taken.

    Attributes:
        attrs: System attributes of the trial.
    """

    def __init__(self) -> None:
        self.attrs: dict[str, Any] = {}

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Notes an attribute."""
        self.attrs[key] = value


class View(optuna.Study):
    """Some trials of a study.

    Args:
        study: The study.
        trials: What is seen of it.
        notes: Takes what a sampler writes; the study's own storage if None.
    """

    def __init__(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], notes: Notes | None = None
    ) -> None:
        self.study_name, self._study_id = study.study_name, study._study_id
        self._directions = study._directions
        self._storage = study._storage if notes is None else notes  # type: ignore[assignment]
        self._trials = trials

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        seen = [t for t in self._trials if states is None or t.state in states]
        return copy.deepcopy(seen) if deepcopy else seen


def searched(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Trials of the search: all but the repeats that confirm a chosen one."""
    return [t for t in trials if t.user_attrs.get("confirms") is None]


def rivals(trials: Iterable[FrozenTrial], hyperparams: Mapping[str, Any]) -> list[FrozenTrial]:
    """Trials that were proposed, with the same epsilon as a trial with these hyperparameters."""
    return [
        t
        for t in searched(trials)
        if "knobs" in t.user_attrs
        and t.user_attrs["knobs"].get(EPSILON_KEY) == hyperparams.get(EPSILON_KEY)
    ]
