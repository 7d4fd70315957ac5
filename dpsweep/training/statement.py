"""The privacy statement of one trained config."""

from dpsweep.config.trial import TrialConfig
from dpsweep.privacy.statement import trial_statement, validation_statement


def statement_of_trial(
    config: TrialConfig, epsilon: float, noise_multiplier: float, void: bool = False
) -> str:
    """What the weights and figures of one run reveal, and of whom."""
    words = trial_statement(
        epsilon=epsilon,
        delta=config.delta,
        num_examples=config.data.num_examples,
        noise_multiplier=noise_multiplier,
        void=void,
    )
    return f"{words} {validation_statement(config.data.validation, config.data.num_held_out)}"
