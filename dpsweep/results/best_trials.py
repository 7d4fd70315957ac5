"""Best trials of a search over several budgets or with two objectives."""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from dpsweep.config.keys import EPSILON
from dpsweep.core.errors import StateError
from dpsweep.results.confirmed import confirmed_table
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.rich_table import plain_table
from dpsweep.results.tables import format_cell, format_hyperparams
from dpsweep.search.objectives import find_pareto_front, get_goal_values, group_by_epsilon
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
