"""By what a search's best config is chosen: posterior mean where there are enough trials."""

import math
from collections.abc import Sequence

from dpsweep.config.space.domains import Range, Space
from dpsweep.config.space.leaves import list_leaves
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.search.surrogate import Surrogate, searched_features
from dpsweep.search.trial_record import Record

_EDGE = 0.05
"""Share of a range, on its log scale, that counts as its edge."""

LEAST_TRIALS = 12
"""Complete trials of one epsilon from which on the posterior chooses better than results do."""


def surrogates(
    sweep: ResolvedSweep, records: Sequence[Record], least: int
) -> dict[float | None, Surrogate]:
    """A process for each epsilon with `least` complete trials of the search or more.

    Trials at one epsilon say little about another. None where nothing that is searched varied.
    """
    groups: dict[float | None, list[Record]] = {}
    for record in records:
        if record.state == "complete" and record.confirms is None and record.value is not None:
            groups.setdefault(record.epsilon, []).append(record)
    return {
        epsilon: Surrogate(sweep.space, group, sweep.config.objective.sign)
        for epsilon, group in groups.items()
        if len(group) >= least and searched_features(sweep.space, group)
    }


def expected_values(sweep: ResolvedSweep, records: Sequence[Record]) -> dict[int, float]:
    """Posterior mean of the objective at each trial's config, by number, where it is to choose."""
    if not sweep.chooses_by_posterior:
        return {}
    found: dict[int, float] = {}
    for one in surrogates(sweep, records, LEAST_TRIALS).values():
        found |= one.means()
    return found


def describe_edges(space: Space, record: Record) -> str:
    """A warning for each searched range at whose edge a trial lies, with the range to search next.

    Ranges on a log scale alone: others mostly end where the values that make sense do.
    """
    found = dict[str, str]()
    for leaf in list_leaves(space):
        key, value = leaf.slot.key, record.hyperparams.get(leaf.slot.key)
        if not isinstance(leaf.domain, Range) or not leaf.domain.is_log or value is None:
            continue
        low, high = leaf.domain.low, leaf.domain.high
        if not low <= value <= high:  # another branch's range
            continue
        share = math.log(value / low) / math.log(high / low) if high > low else 0.5
        if _EDGE < share < 1 - _EDGE:
            continue
        side, center = ("lower", low) if share < 0.5 else ("upper", high)
        width = math.sqrt(high / low)
        found[key] = (
            f"{key} {value:.3g} lies at the {side} edge of its range: search it next with "
            f"{{log_uniform: [{center / width:.3g}, {center * width:.3g}]}}."
        )
    return " ".join(found.values())
