"""Privacy statements: the same sentences in plan, report, MLflow and exported configs."""

import math
from dataclasses import dataclass

NO_EPSILON = "none (void)"
"""Shown where an epsilon would be, after a run under a fixed test secret."""

PRUNING_STATEMENT = (
    "Each trial's noise is calibrated for its full length, and a trial that is ended early is "
    "charged for all of it: pruning saves time, not privacy."
)
"""Sentence on what early stopping means for privacy."""


def trial_statement(
    *,
    epsilon: float,
    delta: float,
    num_examples: int,
    noise_multiplier: float,
    void: bool = False,
    correlated: tuple[int, int, float] | None = None,
    units: str = "training examples",
) -> str:
    """State what one trial's weights and figures reveal.

    Args:
        epsilon: Of the whole run; inf without noise.
        delta: Failure probability.
        num_examples: Examples, or units, of which any one is protected.
        noise_multiplier: Standard deviation over clip norm.
        void: True after a run under a test secret.
        correlated: Rounds, steps and sampling rate of a run whose noise is correlated over its
            steps; None for independent noise.
        units: Words for what is protected.

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
    counted = "over Poisson batches"
    if correlated is not None:
        rounds, steps, rate = correlated
        how = "without sampling" if rate == 1 else f"of Poisson sampling at rate {rate:.3g}"
        counted = (
            f"over {rounds} rounds {how}: its noise is correlated over {steps} steps, and each "
            f"example belongs to a secret group that takes part in {rounds} of them at most"
        )
    return (
        f"({format_epsilon(epsilon)}, {format_delta(delta)})-differentially private for adding or "
        f"removing any one of {num_examples} {units}: noise multiplier "
        f"{noise_multiplier:.4g}, counted with a PLD accountant {counted}."
    )


@dataclass(frozen=True)
class Growth:
    """A number of runs that was raised when results could be seen.

    Attributes:
        plans: Runs that were planned, and how many had begun by then: as launched, and after each
            change.
        num_runs: Runs that the guarantee is for: all that are planned now.
        epsilon: Of the ex-post guarantee (search/charge.py).
        delta: Failure probability of the guarantee.
    """

    plans: tuple[tuple[int, int], ...]
    num_runs: int
    epsilon: float
    delta: float


def format_plans(plans: tuple[tuple[int, int], ...]) -> str:
    """Format the growth of a number of runs: planned runs, and how many had begun by then.

    >>> format_plans(((2, 0), (5, 2), (9, 4)))
    'from 2 to 5 when 2 had begun, to 9 when 4 had begun'
    """
    (first, _), *later = plans
    changes = [f"to {planned} when {begun} had begun" for planned, begun in later]
    return f"from {first} {', '.join(changes)}"


@dataclass(frozen=True)
class SearchSpending:
    """Privacy spent by a search, as far as it is known, and what else its statement says.

    Attributes:
        num_runs: Runs that may have taken a step: pruned, failed and confirming ones included.
        planned: Runs that the sweep file asks for; under private selection, their mean number.
        epsilon: Of all runs together: as they were, or under `shared` and private selection as
            was fixed beforehand.
        delta: Failure probability of the guarantee.
        each: What one trial's epsilon is, if all have the same.
        confirming: How many of the runs repeat a config.
        adaptive: True if later trials depend on earlier results.
        shared: True if epsilon is the budget that the sweep file sets for all runs together.
        proven: (epsilon, delta) of all planned runs, if sampling rate or length of a trial were
            themselves chosen from earlier results; None where `epsilon` is proven.
        how: How `proven`, or under `shared` the whole, is proven.
        explore: What the exploring trials cost together, as a share of all; None for equal shares.
        broken: The budget of all runs together, if they did not keep it.
        to_the_end: Epsilon of all planned runs, where fewer were run and `epsilon` is of those.
        growth: How `planned` was raised when results could be seen; None if it was not.
        ahead: True if `epsilon` and `delta` are of all planned runs, however many have begun.
        void: True if any of them used a test secret.
        accounting: `composition`, `private_selection` or `none`, as the sweep file asks.
        num_held_out: Training examples, or units, that the trials were measured with.
        units: Word for them.
        pruned: True if weak trials may have been ended early.
        warm_start: Sweeps whose results its proposals began from, the newest last, and how many
            trials that one had; None without.
        earlier: (epsilon, delta) of those sweeps together; None if they are not known.
        earlier_ex_post: True if results chose how many runs those sweeps had.
    """

    num_runs: int
    planned: int
    epsilon: float
    delta: float
    each: float | None = None
    confirming: int = 0
    adaptive: bool = True
    shared: bool = False
    proven: tuple[float, float] | None = None
    how: str = ""
    explore: float | None = None
    broken: float | None = None
    to_the_end: float | None = None
    growth: Growth | None = None
    ahead: bool = False
    void: bool = False
    accounting: str = "composition"
    num_held_out: int = 0
    units: str = "examples"
    pruned: bool = False
    warm_start: tuple[tuple[str, ...], int] | None = None
    earlier: tuple[float, float] | None = None
    earlier_ex_post: bool = False

    @property
    def largest(self) -> tuple[float, float]:
        """(epsilon, delta) to be read first: the largest of all figures that the statement has.

        Which of them is proven depends on how the search ended; none of them is above this one.
        What was spent before a warm start is in it, by basic composition: without those results
        these trials would not have been chosen.
        """
        found = [(self.epsilon, self.delta)]
        found += [self.proven] if self.proven else []
        found += [(self.to_the_end, self.delta)] if self.to_the_end is not None else []
        found += [(self.growth.epsilon, self.growth.delta)] if self.growth else []
        epsilon, delta = max(found)
        before = self.earlier or (0.0, 0.0)
        return epsilon + before[0], delta + before[1]


def search_statement(search: SearchSpending) -> str:
    """State what choosing among trials adds, and what the search began from."""
    words = [_state_spending(search)]
    if search.pruned:
        words.append(PRUNING_STATEMENT)
    if search.warm_start is not None:
        sweeps, trials = search.warm_start
        words.append(
            f"Its proposals began from the results of sweep {', before it '.join(sweeps[::-1])} "
            f"on the same data ({trials} trials in the last): what was spent there is not in this "
            f"figure, and adds to it."
        )
        if search.earlier is not None and not (search.void or math.isinf(search.largest[0])):
            figure = _format_guarantee(*search.largest)
            words.append(f"Together, by basic composition: {figure}, {_state_order(search)}.")
    return " ".join(words)


def _state_order(search: SearchSpending) -> str:
    """State under which condition losses of two sweeps add up to one epsilon fixed beforehand."""
    if search.growth is not None or search.earlier_ex_post:
        return "ex post, as results chose the number of runs"
    return (
        "if epsilon and the number of runs here were chosen before those results were seen, and "
        "ex post otherwise"
    )


def _state_spending(search: SearchSpending) -> str:
    selected, num_held_out = search.accounting == "private_selection", search.num_held_out
    if search.void:
        return "VOID: trials of this search used a fixed test secret; there is no privacy here."
    if search.num_runs == 0 and not selected and not search.ahead:
        return "No trial has run, so nothing has been spent."
    if math.isinf(search.epsilon):
        return "NOT PRIVATE: the search trained without noise."
    words = [_state_selection(search) if selected else _state_composition(search)]
    if search.growth is not None:
        words.append(_state_growth(search.growth))
    if search.broken is not None:
        words.insert(
            0,
            f"OVER BUDGET: the sweep allows {_format_guarantee(search.broken, search.delta)} "
            f"for all runs together, and what was run does not keep that.",
        )
    if search.accounting == "none":
        words.append(
            "The sweep asks for accounting: none, which quotes the chosen trial's own figure as "
            "if the trial had been known beforehand."
        )
    if num_held_out:
        words.append(
            f"The choice used {num_held_out} held-out {search.units} without noise; no epsilon "
            f"covers them."
        )
    words.append("Other sweeps and runs on the same data are not counted.")
    return " ".join(words)


def _state_composition(search: SearchSpending) -> str:
    kind = "adaptive" if search.adaptive else "independent"
    trials = f"{search.num_runs - search.confirming} {kind} trials"
    if search.explore is not None:
        trials = f"{search.num_runs - search.confirming} exploring trials"
        trials += " and the final run" if search.confirming else ""
    elif search.confirming:
        trials += f" and {search.confirming} confirming runs"
    if search.ahead:
        trials = f"all {search.planned} planned runs"
    over = "a holdout from the training data" if search.num_held_out else "a public test split"
    figure = _format_guarantee(search.epsilon, search.delta)
    if search.shared:
        runs = f"{search.planned} runs"
        if search.explore is not None:
            runs = (
                f"{search.planned - 1} exploring trials, which cost {search.explore:.3g} of it "
                f"together, and one final run"
            )
        return (
            f"The budget covers the whole search of {runs}, all of them looked at, and any choice "
            f"among them: {figure} by composition {search.how}. Counted: {trials} over {over}."
        )
    each = f"Each trial: {_format_guarantee(search.each, search.delta)}. " if search.each else ""
    way = (search.how if search.ahead else "") or "composition of the runs (PLD)"
    words = (
        f"{each}The search of {trials} over {over}, all of them looked at, and any choice among "
        f"them: {figure} by {way}."
    )
    if search.proven:
        words += (
            " Since batch sizes, lengths or bands were proposed from earlier results, that figure "
            "is an estimate; "
        )
        words += (
            "nothing is proven, since a trial lost more than the search was planned for."
            if math.isinf(search.proven[0])
            else f"proven for all {search.planned} is {_format_guarantee(*search.proven)} by "
            f"{search.how}."
        )
    if search.to_the_end is not None:
        words += (
            f" If results had a say in ending it early, all {search.planned} planned runs count: "
            f"{_format_guarantee(search.to_the_end, search.delta)}."
        )
    return words


def _state_growth(growth: Growth) -> str:
    """State the meaning of a figure for a number of runs that results may have influenced."""
    figure = _format_guarantee(growth.epsilon, growth.delta)
    return (
        f"The number of runs was raised when results could be seen: {format_plans(growth.plans)}. "
        f"A figure for that number is proven only if it was fixed beforehand. For a number that "
        f"results chose, an ex-post guarantee is proven: {figure} for {growth.num_runs} runs, and "
        f"more if more are added."
    )


def _state_selection(search: SearchSpending) -> str:
    """It never tells how many trials were run."""
    figure = _format_guarantee(search.epsilon, search.delta)
    each = f"Each trial: {_format_guarantee(search.each, search.delta)}. " if search.each else ""
    what = "The budget covers the whole search, and releasing" if search.shared else "Releasing"
    return (
        f"{each}{what} the best of its random trials and nothing of the others: {figure} by "
        f"private selection ({search.how}). The number of trials was drawn from a geometric law "
        f"with mean {search.planned}; like every other trial's results, it must stay secret with "
        f"whoever holds the data."
    )


def _format_guarantee(epsilon: float, delta: float) -> str:
    return f"({format_epsilon(epsilon)}, {format_delta(delta)})-DP"


def validation_statement(validation: str, num_held_out: int, units: str = "examples") -> str:
    """State the source of the metrics, and whom that exposes."""
    if validation == "test_split":
        return "Metrics are measured on the test split, which the sweep declares public."
    return (
        f"Metrics are measured, without noise, on {num_held_out} {units} held out of the "
        f"training split. No epsilon covers those {num_held_out} {units}."
    )


def public_weights_statement(weights: list[str]) -> str:
    """State that weights trained elsewhere are declared public; empty without any.

    >>> print(public_weights_statement(["ImageNet's (data.features)"]))
    Declared public, and covered by no epsilon here: the weights that it starts from: ImageNet's \
(data.features).
    """
    if not weights:
        return ""
    named = ", ".join(weights)
    return (
        f"Declared public, and covered by no epsilon here: the weights that it starts from: "
        f"{named}."
    )


def format_epsilon(epsilon: float) -> str:
    """Two decimals, or two digits where that is more, rounded up.

    >>> format_epsilon(3.9912), format_epsilon(4.0), format_epsilon(math.inf)
    ('4.00', '4.00', 'inf')
    >>> format_epsilon(0.001), format_epsilon(0.01234), format_epsilon(0.0999), format_epsilon(0.0)
    ('0.0010', '0.013', '0.10', '0.00')
    """
    if math.isinf(epsilon):
        return "inf"
    places = 2 if epsilon <= 0 else max(2, 1 - math.floor(math.log10(epsilon)))
    rounded = math.ceil(epsilon * 10**places - 1e-9) / 10**places
    return f"{rounded:.{places if rounded < 0.1 else 2}f}"


def format_delta(delta: float) -> str:
    """Two digits, rounded up.

    >>> format_delta(5.546e-6), format_delta(1e-5)
    ('5.6e-06', '1.0e-05')
    """
    unit = 10.0 ** (math.floor(math.log10(delta)) - 1)
    return f"{math.ceil(delta / unit - 1e-9) * unit:.1e}"
