"""The privacy plan of one trial: sampling rate, steps, noise multiplier, epsilon and delta."""

import math
from dataclasses import dataclass

from dpsweep.config.trial import TrialConfig
from dpsweep.privacy.accounting import Run, calibrate_noise
from dpsweep.privacy.statement import (
    public_weights_statement,
    trial_statement,
    validation_statement,
)


@dataclass(frozen=True)
class PrivacyPlan:
    """The numbers a trial runs by, fixed before its first step.

    Attributes:
        num_examples: N.
        run: Sampling rate, noise multiplier and steps.
        epsilon: What the whole run spends, at most; inf without noise.
        delta: Failure probability.
    """

    num_examples: int
    run: Run
    epsilon: float
    delta: float

    def step_after(self, epoch: int) -> int:
        """Steps taken once `epoch` epochs are through."""
        return min(self.run.steps, math.ceil(epoch / self.run.sampling_rate))


def plan_privacy(config: TrialConfig) -> PrivacyPlan:
    """Calibrate the noise to the promise, or count what given noise spends.

    The config's scope is its own trial: under `scope: sweep` the sweep calibrates, and its trials
    come with their noise (config/sweep.py).
    """
    assert config.privacy.scope == "trial", "check_trial refuses the budget of a whole sweep"
    (steps, rate), delta, privacy = config.schedule, config.delta, config.privacy
    if privacy.epsilon is not None:
        run, epsilon = calibrate_noise(privacy.epsilon, delta, rate, steps)
    else:
        assert privacy.noise_multiplier is not None
        run = Run(rate, privacy.noise_multiplier, steps)
        epsilon = run.epsilon(delta)
    return PrivacyPlan(
        num_examples=config.data.num_examples,
        run=run,
        epsilon=epsilon,
        delta=delta,
    )


def statement_of_trial(
    config: TrialConfig, epsilon: float, noise_multiplier: float, void: bool = False
) -> str:
    """State what the weights and figures of one run reveal, and of whom."""
    words = trial_statement(
        epsilon=epsilon,
        delta=config.delta,
        num_examples=config.data.num_examples,
        noise_multiplier=noise_multiplier,
        void=void,
    )
    words = f"{words} {validation_statement(config.data.validation, config.data.num_held_out)}"
    weights = public_weights_statement(
        [*filter(None, (config.data.public_weights, config.model.public_weights))]
    )
    return " ".join(filter(None, (words, weights, config.data.public_words)))
