"""Selection bias of the best trial's result, and the repeats that correct it.

The best of many noisy trials looks better than its config is. A report that gave its figure
alone would report what noise raised most.
"""

from rich.table import Table

from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.rich_table import plain_table
from dpsweep.results.tables import format_cell
from dpsweep.search.ranking import LEAST_TRIALS
from dpsweep.search.trial_record import Record
from dpsweep.store.study import Study


def choice_words(study: Study) -> dict[float | None, str]:
    """Say how the best config of each epsilon was chosen; empty if there is only one way."""
    sweep, groups = study.sweep, dict[float | None, list[Record]]()
    if len(sweep.config.objective.goals) > 1 or not disclosure_of(sweep).tells_trials:
        return {}
    for record in study.records():
        if record.state == "complete" and record.confirms is None:
            groups.setdefault(record.epsilon, []).append(record)
    return {epsilon: _choice(study, group) for epsilon, group in groups.items()}


def _choice(study: Study, complete: list[Record]) -> str:
    """For the complete trials of one epsilon."""
    num = len(complete)
    if any(record.expected is not None for record in complete):
        return (
            f"Chosen by the posterior mean of a Gaussian process over {num} complete trials "
            f"(choose: posterior)."
        )
    if kept := next((r for r in complete if r.margin is not None), None):
        best = max(record.value or 0.0 for record in complete)
        return (
            f"Trial {kept.number}, the default, keeps its place: the best result of {num} is ahead "
            f"by {best - (kept.value or 0.0):.4f}, and {kept.margin:.4f} is half a standard error "
            f"(choose: posterior)."
        )
    if study.sweep.config.choose == "observed":
        return "Chosen as observed (choose: observed)."
    if num < LEAST_TRIALS:
        return (
            f"Chosen as observed: {num} complete trials are fewer than the {LEAST_TRIALS} that a "
            f"posterior takes."
        )
    return "Chosen as observed: the posterior chooses when the search has ended."


def confirmed_table(study: Study) -> Table | None:
    """One line a config that was confirmed, the best first; None if none was."""
    confirmed = study.confirmed()
    if not confirmed:
        return None
    metric, spare = study.sweep.config.objective.metric, ("failed", "as chosen")
    columns = ("trial", metric, "±", "runs", *spare)
    table = plain_table("Confirmed with fresh noise", columns, spare=spare)
    for record in study.best():
        if repeats := confirmed.get(record.number):
            table.add_row(
                str(record.number),
                f"{repeats.mean:.4f}",
                f"{repeats.spread:.4f}" if len(repeats.values) > 1 else "–",
                str(len(repeats.values)),
                str(repeats.num_failed),
                format_cell(record.value),
            )
    return table
