"""Best trials of a search: how they were chosen, what their repeats came to, budgets and fronts.

The best of many noisy trials looks better than its config is. A report that gave its figure
alone would report what noise raised most.
"""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from dpsweep.config.keys import EPSILON
from dpsweep.core.errors import StateError
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.rich_table import plain_table
from dpsweep.results.tables import format_cell, format_hyperparams
from dpsweep.search.objectives import find_pareto_front, get_goal_values, group_by_epsilon
from dpsweep.search.ranking import LEAST_TRIALS
from dpsweep.search.trial_record import Record
from dpsweep.store.study import Study


def choose_trials(study: Study, top: int) -> list[Record]:
    """The trials that a search recommends, the best first.

    Args:
        top: How many are wanted, of each budget. After two objectives, its whole front comes.
    """
    objective, groups = study.sweep.config.objective, group_by_epsilon(study.best())
    if len(objective.goals) > 1:
        return [record for group in groups for record in find_pareto_front(group, objective)]
    return [record for group in groups for record in group[:top]]


def list_best_by_budget(study: Study) -> list[Record]:
    """The best trial of each budget by the first objective, the smallest budget first."""
    return [group[0] for group in group_by_epsilon(study.best())]


def make_no_result_error(study: Study, name: str | None = None) -> StateError:
    """The error for a sweep without a result.

    Args:
        name: What its user calls it, such as OWNER/NAME; as it calls itself if None.
    """
    name = name or study.sweep.name
    return StateError(disclosure_of(study.sweep).describe_nothing(study, name))


def make_no_trial_error(study: Study, see: str) -> StateError:
    """The error for a sweep that ended without a complete trial.

    Args:
        see: What shows its trials.
    """
    failures = disclosure_of(study.sweep).describe_failures(study)
    return StateError(
        f"sweep {study.sweep.name!r} is finished, and no trial was completed{failures}. See: {see}"
    )


def name_config_file(record: Record, out: Path) -> Path:
    """Make the file name of a winner's config: `out`, with the budget if there are several."""
    epsilon = record.hyperparams.get(EPSILON)
    return out if epsilon is None else out.with_stem(f"{out.stem}-epsilon-{epsilon:g}")


def make_summary_tables(study: Study) -> list[Table]:
    """The tables beside that of the best trials: repeats, budgets, the front of objectives."""
    confirmed = confirmed_table(study)
    tables = [confirmed] if confirmed else []
    if len(study.sweep.epsilons) > 1:
        tables.append(make_budget_table(study))
    if len(study.sweep.config.objective.goals) > 1:
        tables.append(make_front_table(study))
    return tables


def make_budget_table(study: Study) -> Table:
    """One line a budget: its best trial, and whether a smaller budget does as well."""
    objective, best = study.sweep.config.objective, list_best_by_budget(study)
    counts = {group[0].number: len(group) for group in group_by_epsilon(study.best())}
    columns = ("ε", "trial", objective.metric, "of trials", "searched", "")
    table = plain_table("By budget", columns, words=("searched", ""))
    for i, record in enumerate(best):
        cost = objective.sign * (record.value or 0.0)
        beaten = any(objective.sign * (other.value or 0.0) <= cost for other in best[:i])
        table.add_row(
            f"{record.hyperparams[EPSILON]:g}",
            str(record.number),
            format_cell(record.value),
            str(counts[record.number]),
            Text(format_hyperparams(record, without=(EPSILON,))),
            "a smaller ε did as well" if beaten else "",
        )
    return table


def make_front_table(study: Study) -> Table:
    """One line a trial that no other beats in both objectives."""
    objective = study.sweep.config.objective
    title = f"Front: no trial has better {' and '.join(objective.goals)}"
    table = plain_table(title, ("trial", *objective.goals, "searched"), words=("searched",))
    for record in study.front():
        values = get_goal_values(objective, record.row, record.config) or ()
        table.add_row(
            str(record.number), *map(format_cell, values), Text(format_hyperparams(record))
        )
    return table


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
            f"by {best - (kept.value or 0.0):.4f}, and {kept.margin:.4f} is a standard error "
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
