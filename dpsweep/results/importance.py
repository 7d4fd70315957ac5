"""Importance of the searched keys for the result.

PED-ANOVA (Watanabe et al., arXiv:2304.10255; for keys that only some trials have,
arXiv:2601.20800), as Optuna computes it: how far the distribution of a key among the best trials
lies from its distribution among all. Pruned and failed trials have no result and take no part.
"""

import warnings
from dataclasses import dataclass

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from dpsweep.config.space.domains import Choice
from dpsweep.config.space.leaves import Leaf, list_leaves
from dpsweep.search.study_view import list_search_trials
from dpsweep.search.trial_record import HYPERPARAMS
from dpsweep.store.study import Study

LEAST_TRIALS = 8
"""Complete trials below which nothing can be told."""

_BEST, _QUANTILE = 5, 0.1
"""The best tenth is compared with all, and never fewer than five trials, as Optuna advises."""


@dataclass(frozen=True)
class Importance:
    """One searched key."""

    key: str  # its dotted key in the trial config
    branch: str | None  # the mapping of a one_of or each_of it stands in; None if it is everywhere
    share: float  # of all keys' importance together, in [0, 1]


def importances(study: Study) -> list[Importance]:
    """Every key that varied, the most important first; empty with too few complete trials.

    After two objectives, importance is for the first.
    """
    found = [leaf for leaf in list_leaves(study.sweep.space) if not _is_fixed(leaf)]
    trials = [
        _in_full(trial, found)
        for trial in list_search_trials(study.stored_trials())
        if trial.state == TrialState.COMPLETE and "config" in trial.user_attrs
    ]
    if len(trials) < LEAST_TRIALS:
        return []
    shares = _shares(trials, study.sweep.config.objective.sign)
    placed = [
        Importance(leaf.slot.key, leaf.branch, shares[leaf.slot.name])
        for leaf in found
        if leaf.slot.name in shares
    ]
    return sorted(placed, key=lambda one: -one.share)


def _is_fixed(leaf: Leaf) -> bool:
    return isinstance(leaf.domain, Choice) and len(leaf.domain.options) < 2


def _in_full(trial: FrozenTrial, found: list[Leaf]) -> FrozenTrial:
    """The trial with what was taken in turn among its parameters: no sampler proposed that."""
    params, ways, hyperparams = (
        dict(trial.params),
        dict(trial.distributions),
        trial.user_attrs[HYPERPARAMS],
    )
    for leaf in found:
        name, domain = leaf.slot.name, leaf.domain
        if isinstance(domain, Choice) and domain.in_turn and leaf.slot.key in hyperparams:
            index = domain.options.index(hyperparams[leaf.slot.key])
            params[name] = domain.labels[index]
            ways[name] = CategoricalDistribution(domain.labels)
    return optuna.trial.create_trial(
        state=TrialState.COMPLETE, values=trial.values[:1], params=params, distributions=ways
    )


def _shares(trials: list[FrozenTrial], sign: int) -> dict[str, float]:
    """Importance by name in the study, adding up to 1; empty if all trials did equally well."""
    from optuna.importance import PedAnovaImportanceEvaluator  # brings scikit-learn and pandas

    study = optuna.create_study(direction="minimize" if sign > 0 else "maximize")
    study.add_trials(trials)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = PedAnovaImportanceEvaluator(
            target_quantile=min(0.5, max(_QUANTILE, _BEST / len(trials)))
        )
        raw = evaluator.evaluate(study, target=lambda trial: sign * trial.values[0])
    whole = sum(raw.values())
    return {name: value / whole for name, value in raw.items()} if whole > 0 else {}
