"""Ways to spend one epsilon on a search, and what each leaves for the exported model."""

from dataclasses import dataclass

from dpsweep.privacy.accounting import Run, calibrate_noise
from dpsweep.privacy.search_budget import Schedule, SearchBudget

USUAL_SHARE = 0.05
"""Cost of exploring, if no share is given."""

FEW_RUNS = 3
"""So many equal shares still beat a final run after noisy trials (docs/benchmarks/explore.md)."""


@dataclass(frozen=True)
class Ways:
    """Own epsilon of the released model, by how one epsilon is spent on a whole search.

    Attributes:
        num_trials: Trials of the search; for private selection, their mean number.
        epsilon: Of the whole search.
        equal: Where every trial has an equal share.
        selection: By private selection.
        explore: Where exploring trials have `share`, and a final run the rest.
        share: Of mu squared.
        each: Own epsilon of one exploring trial.
    """

    num_trials: int
    epsilon: float
    equal: float
    selection: float
    explore: float
    share: float
    each: float

    @property
    def advice(self) -> str:
        """Recommend a way for the number of trials, in a sentence."""
        if self.num_trials <= FEW_RUNS:
            return (
                f"For {self.num_trials} trials equal shares do well; explore-then-train pays from "
                f"{FEW_RUNS + 1} on."
            )
        return (
            f"For {self.num_trials} trials explore-then-train suits best: budget: {{explore: "
            f"{{trials: {self.num_trials}, share: {self.share:g}}}}} under privacy.scope: sweep."
        )


def ways_to_spend(
    epsilon: float, delta: float, schedule: Schedule, num_trials: int, share: float = USUAL_SHARE
) -> Ways:
    """Compare the ways for trials that all have the same schedule.

    Args:
        epsilon: Of the whole search.
        delta: In (0, 1).
        schedule: T and q.
        num_trials: Trials of the search.
        share: What exploring costs, in (0, 1).

    Raises:
        InvalidKey: If epsilon is too small for any noise.
    """
    steps, rate = schedule

    def find_own_epsilon(noise: float) -> float:
        return Run(rate, noise, steps).epsilon(delta)

    alike = (schedule,)
    selection = SearchBudget("private_selection", epsilon, delta, num_trials, alike, vary=False)
    selection_noise = selection.noise(schedule)  # first, since it tells soonest what is too little
    equal, _ = calibrate_noise(epsilon, delta, rate, steps * num_trials)
    explore = SearchBudget(
        "composition", epsilon, delta, num_trials + 1, alike, vary=False, share=share
    )
    return Ways(
        num_trials=num_trials,
        epsilon=epsilon,
        equal=find_own_epsilon(equal.noise_multiplier),
        selection=find_own_epsilon(selection_noise),
        explore=find_own_epsilon(explore.noise(schedule, final=True)),
        share=share,
        each=find_own_epsilon(explore.noise(schedule)),
    )
