"""What is promised, in words. The same sentences in plan, report, MLflow and exported configs."""

import math


def trial_statement(
    *, epsilon: float, delta: float, num_examples: int, noise_multiplier: float, void: bool = False
) -> str:
    """What one trial's weights and figures reveal.

    >>> print(trial_statement(
    ...     epsilon=3.998, delta=6.8e-6, num_examples=50000, noise_multiplier=1.07))
    (4.00, 6.8e-06)-differentially private for adding or removing any one of 50000 training \
examples: noise multiplier 1.07, counted with a PLD accountant over Poisson batches.
    """
    if void:
        return (
            "VOID: trained with a fixed test secret. Anyone who knows it can take the noise off; "
            "there is no privacy here."
        )
    if math.isinf(epsilon):
        return "NOT PRIVATE: trained without noise. The weights may reveal any training example."
    return (
        f"({_rounded(epsilon)}, {delta:.2g})-differentially private for adding or removing any one "
        f"of {num_examples} training examples: noise multiplier {noise_multiplier:.4g}, counted "
        f"with a PLD accountant over Poisson batches."
    )


def search_statement(
    *,
    num_trials: int,
    epsilon: float,
    delta: float,
    accounting: str,
    adaptive: bool,
    void: bool = False,
) -> str:
    """What choosing among trials adds.

    Args:
        num_trials: Trials that took at least one step, pruned and failed ones included.
        epsilon: Of all of them together, by composition.
        delta: Of the same.
        accounting: `composition` or `none`, as the sweep file asks.
        adaptive: True if later trials depend on earlier results.
        void: True if any of them used a test secret.
    """
    if void:
        return "VOID: trials of this search used a fixed test secret; there is no privacy here."
    if num_trials == 0:
        return "No trial has run, so nothing has been spent."
    kind = "adaptive" if adaptive else "independent"
    whole = (
        "no privacy at all"
        if math.isinf(epsilon)
        else f"({_rounded(epsilon)}, {delta:.2g})-DP by composition (PLD)"
    )
    together = f"The search of {num_trials} {kind} trials, all of them looked at: {whole}."
    if accounting == "composition":
        return f"{together} Quote this figure for whatever was chosen by this search."
    return (
        f"The search is not charged (accounting: none): the figure above is that of the chosen "
        f"trial alone, as if it had been known beforehand. {together}"
    )


def validation_statement(validation: str, num_held_out: int) -> str:
    """Where the accuracies come from, and who that exposes."""
    if validation == "test_split":
        return "Accuracies are measured on the test split, which the sweep declares public."
    return (
        f"Accuracies are measured, without noise, on {num_held_out} examples held out of the "
        f"training split. No epsilon above covers those {num_held_out} examples."
    )


def _rounded(epsilon: float) -> str:
    """Two decimals, never rounded below what was spent."""
    return f"{math.ceil(epsilon * 100 - 1e-9) / 100:.2f}"
