"""A sweep's space and sampler, in Optuna's terms."""

import warnings

import optuna
from optuna.samplers import BaseSampler, QMCSampler, RandomSampler, TPESampler

from dpsweep.config.space import Range
from dpsweep.config.sweep import SamplerConfig, StopConfig
from dpsweep.core.seeds import public_seed


class OptunaDraw:
    """Draws each value from an Optuna trial, which remembers it."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def number(self, name: str, domain: Range) -> float | int:
        """A number in the range."""
        if domain.is_whole:
            return self._trial.suggest_int(
                name, int(domain.low), int(domain.high), log=domain.is_log
            )
        return self._trial.suggest_float(name, domain.low, domain.high, log=domain.is_log)

    def option(self, name: str, labels: tuple[str | int | float | bool, ...]) -> int:
        """Index of one of the labels."""
        return labels.index(self._trial.suggest_categorical(name, labels))

    def turn(self, name: str, labels: tuple[str, ...]) -> int:
        """By the trial's number: the sampler has no say, and a resumed search takes the same."""
        return self._trial.number % len(labels)


def sampler(config: SamplerConfig, seed: int, number: int) -> BaseSampler:
    """The sampler that proposes trial `number`, and that one alone.

    Its seed depends on the sweep's seed and the trial's number, so that a resumed search
    proposes what an uninterrupted one would have.
    """
    own = public_seed(seed, "search", number)
    if config.name == "random":
        return RandomSampler(seed=own)
    if config.name == "qmc":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return QMCSampler(
                scramble=True,
                seed=public_seed(seed, "search"),  # one sequence; the study counts along it
                independent_sampler=RandomSampler(seed=own),
                warn_independent_sampling=False,
            )
    return TPESampler(n_startup_trials=config.startup_trials, seed=own)


def pruner(config: StopConfig) -> optuna.pruners.BasePruner:
    """Who ends a trial early; its memory is the study's."""
    if config.name == "median":
        return optuna.pruners.MedianPruner(
            n_startup_trials=4, n_warmup_steps=config.warmup_epochs - 1
        )
    if config.name == "successive_halving":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=config.warmup_epochs, reduction_factor=config.reduction
        )
    return optuna.pruners.NopPruner()
