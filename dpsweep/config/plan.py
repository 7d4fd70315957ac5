"""The privacy plan of one trial: sampling rate, steps, noise multiplier, epsilon and delta."""

import math
from dataclasses import dataclass

from dpsweep.config.trial import TrialConfig
from dpsweep.privacy.accounting import Run, calibrate_noise
from dpsweep.privacy.correlated import Correlation
from dpsweep.privacy.statement import (
    public_weights_statement,
    trial_statement,
    validation_statement,
)


@dataclass(frozen=True)
class PrivacyPlan:
    """The numbers a trial runs by, fixed before its first step."""

    num_examples: int  # N
    run: Run  # sampling rate, noise multiplier and steps, as the accountant counts them
    epsilon: float  # what the whole run spends, at most; inf without noise
    delta: float  # failure probability
    # of the noise over the steps; None for independent noise
    correlation: Correlation | None = None

    @property
    def steps(self) -> int:
        """T: steps of the trial; `run.steps` are fewer where noise is correlated."""
        return self.run.steps if self.correlation is None else self.correlation.steps

    @property
    def sampling_rate(self) -> float:
        """Probability with which a step samples an example of its group, or any example."""
        return (
            self.run.sampling_rate if self.correlation is None else self.correlation.sampling_rate
        )

    def step_after(self, epoch: int) -> int:
        """Steps taken once `epoch` epochs are through."""
        cycle = 1 if self.correlation is None else self.correlation.cycle
        return min(self.steps, math.ceil(epoch * cycle / self.sampling_rate))

    def rounds_after(self, step: int) -> int:
        """Count the accountant's steps among the first `step` steps."""
        return step if self.correlation is None else self.correlation.rounds_after(step)


def plan_privacy(config: TrialConfig) -> PrivacyPlan:
    """Calibrate the noise to the target epsilon, or count what given noise spends.

    The config's scope is its own trial: under `scope: sweep` the sweep calibrates, and its trials
    come with their noise (config/sweep.py).
    """
    assert config.privacy.scope == "trial", "check_trial refuses the budget of a whole sweep"
    (steps, rate), delta, privacy = config.steps_and_rate, config.delta, config.privacy
    if privacy.epsilon is not None:
        run, epsilon = calibrate_noise(privacy.epsilon, delta, rate, steps)
    else:
        assert privacy.noise_multiplier is not None
        run = Run(rate, privacy.noise_multiplier, steps)
        epsilon = run.epsilon(delta)
    correlation = config.noise.correlate(config.settings)
    return PrivacyPlan(
        num_examples=config.data.num_examples,
        run=run,
        epsilon=epsilon,
        delta=delta,
        correlation=correlation,
    )


def statement_of_trial(
    config: TrialConfig, epsilon: float, noise_multiplier: float, void: bool = False
) -> str:
    """State what the weights and figures of one run reveal, and of whom."""
    rounds, rate = config.steps_and_rate
    words = trial_statement(
        epsilon=epsilon,
        delta=config.delta,
        num_examples=config.data.num_examples,
        noise_multiplier=noise_multiplier,
        void=void,
        correlated=None if rounds == config.num_steps else (rounds, config.num_steps, rate),
        units=config.data.private_units,
    )
    data = config.data
    source = validation_statement(data.validation, data.num_held_out, data.protected)
    weights = public_weights_statement(
        [*filter(None, (data.public_weights, config.model.public_weights))]
    )
    return " ".join(filter(None, (words, source, weights, data.public_words)))
