"""By what a search's best config is chosen: posterior mean where there are enough trials."""

from collections.abc import Sequence

from dpsweep.config.sweep import ResolvedSweep
from dpsweep.search.surrogate import Surrogate, searched_features
from dpsweep.search.trial_record import Record

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
