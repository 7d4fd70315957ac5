"""A sweep's space, sampler and pruner, in Optuna's terms."""

import warnings
from collections.abc import Sequence

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from dpsweep.compat import restrict_study
from dpsweep.config.search import PrunerConfig, SamplerConfig
from dpsweep.config.space.domains import Choice, Range, Space
from dpsweep.core.seeds import derive_public_seed
from dpsweep.search.study_view import list_comparable_trials
from dpsweep.search.trial_record import HYPERPARAMS


def make_distribution(domain: Range) -> FloatDistribution | IntDistribution:
    """A range, as Optuna says it."""
    if domain.is_whole:
        return IntDistribution(int(domain.low), int(domain.high), log=domain.is_log)
    return FloatDistribution(domain.low, domain.high, log=domain.is_log)


def make_distributions(space: Space) -> dict[str, BaseDistribution]:
    """Those keys of a space without conditions that leave a choice, by name."""
    found: dict[str, BaseDistribution] = {}
    for path, domain in space.domains.items():
        name = ".".join(map(str, path))
        if isinstance(domain, Range):
            found[name] = make_distribution(domain)
        elif isinstance(domain, Choice) and not domain.in_turn and len(domain.options) > 1:
            found[name] = CategoricalDistribution(domain.labels)
    return found


def make_sampler(
    config: SamplerConfig, seed: int, path: tuple[int, ...], history: Sequence[FrozenTrial] = ()
) -> BaseSampler:
    """The sampler that makes one proposal, and that one alone; qmc has `compat.sobol_point`.

    Its seed depends on the sweep's seed and on `path`, the trial's place and the attempt, so that
    a resumed search proposes what an uninterrupted one would have.

    Args:
        history: Trials of an earlier sweep, for cmaes to start from; the others see them anyway.
    """
    own = derive_public_seed(seed, "search", *path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if config.name == "gp":
            return GPSampler(
                seed=own, n_startup_trials=config.startup_trials, warn_independent_sampling=False
            )
        if config.name == "cmaes":
            return CmaEsSampler(
                seed=own,
                n_startup_trials=config.startup_trials,
                warn_independent_sampling=False,
                source_trials=list(history) or None,
            )
    if config.name == "tpe":
        return TPESampler(
            seed=own,
            n_startup_trials=config.startup_trials,
            multivariate=config.multivariate,
            constant_liar=config.constant_liar,
        )
    return RandomSampler(seed=own)


class PeerPruner(optuna.pruners.BasePruner):
    """Compares a trial with those of the same budget alone."""

    def __init__(self, inner: optuna.pruners.BasePruner) -> None:
        self._inner = inner

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """True if the trial is to end."""
        among = list_comparable_trials(
            study.get_trials(deepcopy=False), trial.user_attrs.get(HYPERPARAMS, {})
        )
        return self._inner.prune(restrict_study(study, among), trial)


def make_pruner(config: PrunerConfig) -> optuna.pruners.BasePruner:
    """Make the pruner that ends trials early; its state is the study's."""
    if config.name == "median":
        return PeerPruner(
            optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=config.warmup_epochs - 1)
        )
    if config.name == "successive_halving":
        return PeerPruner(
            optuna.pruners.SuccessiveHalvingPruner(
                min_resource=config.warmup_epochs, reduction_factor=config.reduction
            )
        )
    return optuna.pruners.NopPruner()
