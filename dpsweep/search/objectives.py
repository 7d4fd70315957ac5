"""Values of a trial's objectives, and the Pareto front."""

import math
from collections.abc import Sequence

from dpsweep.config.keys import EPSILON
from dpsweep.config.search import Direction, Goal, ObjectiveConfig
from dpsweep.config.trial import TrialConfig
from dpsweep.core.types import Row
from dpsweep.search.trial_record import Record


def get_goal_values(
    objective: ObjectiveConfig, row: Row | None, config: TrialConfig
) -> tuple[float, ...] | None:
    """The objectives at a trial's last report; None if there is none, or one is not finite."""
    if row is None:
        return None
    values = tuple(_get_goal_value(goal, row, config) for goal in objective.goals)
    return values if all(map(math.isfinite, values)) else None


def _get_goal_value(goal: Goal, row: Row, config: TrialConfig) -> float:
    """One of them. epsilon is the target or, where the noise was given, what was spent."""
    if goal == "epsilon":
        return config.privacy.epsilon or row["privacy/epsilon_spent"]
    return row[goal]


def find_pareto_front(records: Sequence[Record], objective: ObjectiveConfig) -> list[Record]:
    """Complete trials that no other beats in one objective and equals in the rest.

    Best first, by the first objective. With one objective they are the best and its equals.
    """
    placed = [
        (record, values)
        for record in records
        if record.state == "complete"
        and (values := get_goal_values(objective, record.row, record.config))
    ]
    costs = [_to_costs(values, objective.directions) for _, values in placed]
    kept = [
        (cost, record.number, record)
        for cost, (record, _) in zip(costs, placed, strict=True)
        if not any(_dominates(other, cost) for other in costs)
    ]
    return [record for *_, record in sorted(kept, key=lambda item: item[:2])]


def _to_costs(values: Sequence[float], directions: Sequence[Direction]) -> tuple[float, ...]:
    signs = (-1 if direction == "maximize" else 1 for direction in directions)
    return tuple(sign * value for sign, value in zip(signs, values, strict=True))


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def group_by_epsilon(records: Sequence[Record]) -> list[list[Record]]:
    """Trials by the epsilon they were given in turn, the smallest first; one list if by none."""
    found: dict[float, list[Record]] = {}
    for record in records:
        found.setdefault(record.hyperparams.get(EPSILON, 0.0), []).append(record)
    return [found[epsilon] for epsilon in sorted(found)]
