"""Ways to spend one epsilon on a search, and what each leaves for the exported model."""

from collections.abc import Callable
from dataclasses import dataclass

from dpsweep.privacy.accounting import Run
from dpsweep.privacy.search_budget import Schedule, SearchBudget

USUAL_SHARE = 0.05
"""Cost of exploring, if no share is given."""

FEW_RUNS = 2
"""So many equal shares do as well as explore-then-train (docs/benchmarks/explore.md)."""

Ends = tuple[float, float]
"""Least and largest own epsilon of a run, over the batch sizes and lengths that are searched."""


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
    equal: Ends
    selection: Ends
    explore: Ends
    share: float
    each: Ends

    @property
    def advice(self) -> str:
        """Recommend a way for the number of trials, in a sentence or two."""
        if self.num_trials <= FEW_RUNS:
            return (
                f"For {self.num_trials} trials equal shares do well; explore-then-train pays from "
                f"{FEW_RUNS + 1} on."
            )
        if self.explore[1] < max(self.equal[0], self.selection[0]):
            return (
                f"With a share of {self.share:g} explore-then-train leaves less than another way: "
                f"give a smaller one, such as budget.explore.share: {USUAL_SHARE:g}."
            )
        words = (
            f"For {self.num_trials} trials explore-then-train suits best: budget: {{explore: "
            f"{{trials: {self.num_trials}, share: {self.share:g}}}}} under privacy.scope: sweep."
        )
        if self.explore[0] < max(self.equal[0], self.selection[0]):
            words += (
                " At some batch sizes or lengths another way leaves more: fix train.batch_size and "
                "train.epochs, for which explore-then-train is counted more closely."
            )
        return words


def ways_to_spend(
    epsilon: float,
    delta: float,
    schedules: tuple[Schedule, ...],
    num_trials: int,
    share: float = USUAL_SHARE,
    *,
    vary: bool = False,
) -> Ways:
    """Compare the ways.

    Args:
        epsilon: Of the whole search.
        delta: In (0, 1).
        schedules: T and q of trials, at the ends of what the search may choose.
        num_trials: Trials of the search.
        share: What exploring costs, in (0, 1).
        vary: True if the search may choose the schedule. It is then charged by Renyi, as it is run.

    Raises:
        InvalidKey: If epsilon is too small for any noise.
    """

    def find_ends(noise: Callable[[Schedule], float]) -> Ends:
        found = [Run(rate, noise((steps, rate)), steps).epsilon(delta) for steps, rate in schedules]
        return min(found), max(found)

    def make_budget(num_runs: int, share: float | None = None) -> SearchBudget:
        return SearchBudget("composition", epsilon, delta, num_runs, schedules, vary, share)

    selection = SearchBudget("private_selection", epsilon, delta, num_trials, schedules, vary)
    selection_ends = find_ends(selection.noise)  # first, since it tells soonest what is too little
    explore = make_budget(num_trials + 1, share)
    return Ways(
        num_trials=num_trials,
        epsilon=epsilon,
        equal=find_ends(make_budget(num_trials).noise),
        selection=selection_ends,
        explore=find_ends(lambda schedule: explore.noise(schedule, final=True)),
        share=share,
        each=find_ends(explore.noise),
    )
