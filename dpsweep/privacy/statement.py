"""What is promised, in words. The same sentences in plan, report, MLflow and exported configs."""

import math
from dataclasses import dataclass


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
        f"({shown_epsilon(epsilon)}, {shown_delta(delta)})-differentially private for adding or "
        f"removing any one of {num_examples} training examples: noise multiplier "
        f"{noise_multiplier:.4g}, counted with a PLD accountant over Poisson batches."
    )


@dataclass(frozen=True)
class Search:
    """What a search has spent, as far as it is known.

    Attributes:
        num_trials: Trials that may have taken a step, pruned and failed ones included.
        epsilon: Of all of them together, by composing the runs as they were.
        delta: Of the same.
        adaptive: True if later trials depend on earlier results.
        proven: (epsilon, delta) by basic composition, if sampling rate, noise or length of a
            trial were themselves chosen from earlier results (infinite if no trial promised an
            epsilon); None where `epsilon` is proven.
        void: True if any of them used a test secret.
    """

    num_trials: int
    epsilon: float
    delta: float
    adaptive: bool
    proven: tuple[float, float] | None = None
    void: bool = False


def search_statement(search: Search, *, accounting: str, num_held_out: int) -> str:
    """What choosing among trials adds.

    Args:
        search: What was spent.
        accounting: `composition` or `none`, as the sweep file asks.
        num_held_out: Training examples that the trials were measured with.
    """
    if search.void:
        return "VOID: trials of this search used a fixed test secret; there is no privacy here."
    if search.num_trials == 0:
        return "No trial has run, so nothing has been spent."
    if math.isinf(search.epsilon):
        return "NOT PRIVATE: the search trained without noise."
    kind = "adaptive" if search.adaptive else "independent"
    words = [
        f"The search of {search.num_trials} {kind} trials, all of them looked at, and any choice "
        f"among them: ({shown_epsilon(search.epsilon)}, {shown_delta(search.delta)})-DP by "
        f"composition of the runs (PLD)."
    ]
    if search.proven:
        epsilon, delta = search.proven
        proven = (
            "nothing is proven, since the noise was given and not calibrated to an epsilon."
            if math.isinf(epsilon)
            else f"proven is ({shown_epsilon(epsilon)}, {shown_delta(delta)})-DP by basic "
            f"composition."
        )
        words.append(
            f"Since batch sizes or lengths were proposed from earlier results, that figure is an "
            f"estimate; {proven}"
        )
    if accounting == "none":
        words.append(
            "The sweep asks for accounting: none, which quotes the chosen trial's own figure as "
            "if the trial had been known beforehand."
        )
    if num_held_out:
        words.append(
            f"The choice used {num_held_out} held-out examples without noise; no epsilon covers "
            f"them."
        )
    words.append("Other sweeps and runs on the same data are not counted.")
    return " ".join(words)


def validation_statement(validation: str, num_held_out: int) -> str:
    """Where the accuracies come from, and who that exposes."""
    if validation == "test_split":
        return "Accuracies are measured on the test split, which the sweep declares public."
    return (
        f"Accuracies are measured, without noise, on {num_held_out} examples held out of the "
        f"training split. No epsilon covers those {num_held_out} examples."
    )


def shown_epsilon(epsilon: float) -> str:
    """Two decimals, rounded up.

    >>> shown_epsilon(3.9912), shown_epsilon(4.0), shown_epsilon(math.inf)
    ('4.00', '4.00', 'inf')
    """
    return "inf" if math.isinf(epsilon) else f"{math.ceil(epsilon * 100 - 1e-9) / 100:.2f}"


def shown_delta(delta: float) -> str:
    """Two digits, rounded up.

    >>> shown_delta(5.546e-6), shown_delta(1e-5)
    ('5.6e-06', '1.0e-05')
    """
    unit = 10.0 ** (math.floor(math.log10(delta)) - 1)
    return f"{math.ceil(delta / unit - 1e-9) * unit:.1e}"
