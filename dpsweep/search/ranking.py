"""Ranking of a search's trials: by posterior mean, by results and the default, and by repeats.

With few trials the best of them is best by chance as much as by its config, and a default that
does well without a search is the safer choice: it keeps its place unless another trial is clearly
better. That is the one-standard-error rule (Breiman et al. 1984, section 3.4.3).
All of it is post-processing of results that have been charged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dpsweep.config.sweep import ResolvedSweep
from dpsweep.search.confirmation import Confirmation, final_of, summarize_repeats
from dpsweep.search.surrogate import Surrogate, searched_features
from dpsweep.search.trial_record import Record

LEAST_TRIALS = 12
"""Complete trials of one epsilon from which on the posterior chooses better than results alone."""

_ACCURACY = "valid/accuracy"


@dataclass(frozen=True)
class Choice:
    """Grounds on which a search's best config is chosen; results alone where both are empty."""

    expected: Mapping[int, float]  # posterior mean of the objective at trials' configs, by number
    # how far ahead of the default, trial 0, another would have to be; None if it does not stay
    margin: float | None = None

    def apply(self, records: Sequence[Record]) -> list[Record]:
        """Return the records with what they are ranked by."""
        return [
            replace(
                record,
                expected=self.expected.get(record.number),
                margin=None if record.number else self.margin,
            )
            for record in records
        ]


def make_choice(sweep: ResolvedSweep, records: Sequence[Record]) -> Choice:
    """Find the grounds of the choice among a search's trials, all of which have ended."""
    return Choice(expected_values(sweep, records), find_margin(sweep, records))


def surrogates(
    sweep: ResolvedSweep, records: Sequence[Record], least: int
) -> dict[float | None, Surrogate]:
    """A process for each epsilon with `least` complete trials of the search or more.

    Trials at one epsilon say little about another. None where nothing that is searched varied.
    Of exploring trials the process sees the step that was searched (`as_searched`).
    """
    groups: dict[float | None, list[Record]] = {}
    for record in records:
        if record.state == "complete" and record.confirms is None and record.value is not None:
            groups.setdefault(record.epsilon, []).append(as_searched(sweep, record))
    return {
        epsilon: Surrogate(sweep.space, group, sweep.config.objective.sign)
        for epsilon, group in groups.items()
        if len(group) >= least and searched_features(sweep.space, group)
    }


def as_searched(sweep: ResolvedSweep, record: Record) -> Record:
    """A record with the config that was searched: of an exploring trial, the final run's.

    Its own step is smaller, as its noise is larger.
    """
    if not sweep.explores or record.final:
        return record
    return replace(record, config=sweep.final(record.config))


def expected_values(sweep: ResolvedSweep, records: Sequence[Record]) -> dict[int, float]:
    """Posterior mean of the objective at each trial's config, by number, where it is to choose."""
    if not sweep.chooses_by_posterior:
        return {}
    found: dict[int, float] = {}
    for one in surrogates(sweep, records, LEAST_TRIALS).values():
        found |= one.means()
    return found


def find_margin(sweep: ResolvedSweep, records: Sequence[Record]) -> float | None:
    """A standard error of the default's accuracy, where the default is to keep its place.

    sqrt(p (1 - p) / n) over n examples. The default is the first trial of a default space, of one
    method and epsilon; it keeps its place where trials are too few for a posterior, and none is
    ahead of it by more. None elsewhere, and where the objective is no accuracy.
    """
    done = {r.number: r.value for r in records if r.state == "complete" and r.confirms is None}
    values = [value for value in done.values() if value is not None]
    default, is_accuracy = done.get(0), sweep.config.objective.metric == _ACCURACY
    if not (sweep.chooses_by_posterior and sweep.starts_at_default and is_accuracy):
        return None
    if default is None or len(values) >= LEAST_TRIALS:
        return None
    num = sweep.written.data.num_held_out or sweep.written.data.spec.num_test
    margin = math.sqrt(default * (1 - default) / num)
    return margin if max(values) <= default + margin else None


def rank_trials(records: Sequence[Record], sign: int) -> list[Record]:
    """Complete trials of the search, the best first: by posterior mean or, without, as observed.

    A default that keeps its place comes before all others.

    Args:
        records: Of the whole study, or of a part of it.
        sign: 1 if small objectives are good, -1 if large ones are.
    """
    done = [r for r in records if r.state == "complete" and r.confirms is None]
    return sorted(done, key=lambda r: (r.margin is None, sign * r.ranking_value, r.number))


def rank_best(records: Sequence[Record], sign: int) -> list[Record]:
    """Complete trials of the search, the best first: by their repeats, where there are any.

    A complete final run comes before all of them: it is what they were run for.
    """
    final = final_of(records)
    ranking = rank_by_confirmed(rank_trials(records, sign), summarize_repeats(records), sign)
    return [final, *ranking] if final else ranking


def rank_by_confirmed(
    ranking: Sequence[Record], confirmed: dict[int, Confirmation], sign: int
) -> list[Record]:
    """A ranking with the confirmed trials first, by their means; fewer failed repeats first."""

    def place(record: Record) -> tuple[bool, int, float]:
        if record.number not in confirmed:
            return True, 0, 0.0
        repeats = confirmed[record.number]
        return False, repeats.num_failed, sign * repeats.mean

    return sorted(ranking, key=place)
