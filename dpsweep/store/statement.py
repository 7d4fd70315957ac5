"""The privacy spent by a search, from what its study knows."""

from dataclasses import replace

from dpsweep.privacy.statement import (
    NO_EPSILON,
    SearchSpending,
    format_delta,
    format_epsilon,
    search_statement,
)
from dpsweep.search.charge import compute_search_privacy, get_charged_run
from dpsweep.store.study import Study


def describe_search_privacy(study: Study, *, planned: bool = False) -> str:
    """The privacy statement of a study's search, with all that stands behind its figure.

    Args:
        planned: True for all that may still be run, beside what has begun; False for what has.
    """
    return search_statement(compute_spending(study, study.num_planned if planned else None))


def format_headline(study: Study) -> tuple[str, str]:
    """Format the search's epsilon and delta, to be read before the statement: its largest figures.

    Returns:
        Epsilon and delta; none and a dash for a void search. Epsilon begins with > if the search
        began from sweeps of which it is not known what they spent.
    """
    spent = compute_spending(study)
    if spent.void:
        return NO_EPSILON, "–"
    epsilon, delta = spent.largest
    above = "> " if spent.warm_start and not spent.earlier else ""
    return above + format_epsilon(epsilon), format_delta(delta)


def sum_with_earlier(study: Study) -> tuple[float, float] | None:
    """(epsilon, delta) of all planned runs and of the sweeps that the search began from.

    None if what those spent was not noted, as by earlier versions.
    """
    spent = compute_spending(study, study.num_planned)
    return spent.largest if spent.warm_start is None or spent.earlier else None


def is_ex_post(study: Study) -> bool:
    """True if results chose how many runs there are, here or in a sweep that this began from."""
    spent = compute_spending(study, study.num_planned)
    return spent.growth is not None or spent.earlier_ex_post


def compute_spending(study: Study, ahead: int | None = None) -> SearchSpending:
    """Compute the privacy spent by a study's search, and by the sweeps that it began from.

    Args:
        study: The search.
        ahead: Runs in all that the figure is to cover; None for those that have begun.
    """
    records, warm, config = study.records(), study.warm_start, study.sweep.config
    spent = compute_search_privacy(
        study.sweep,
        [get_charged_run(record) for record in records],
        confirming=sum(record.confirms is not None for record in records),
        void=study.is_void or any(record.void for record in records),
        plans=study.plans,
        ahead=ahead,
    )
    # A sampler that does not learn took nothing from the earlier sweep.
    spent = replace(spent, pruned=config.pruner.name != "none")
    if not warm or not config.sampler.learns:
        return spent
    # Studies of before have no figure of what the earlier sweep spent.
    earlier = warm.get("spent")
    return replace(
        spent,
        warm_start=(tuple(warm["sweeps"]), warm["trials"]),
        earlier=tuple(earlier) if earlier else None,
        earlier_ex_post=warm.get("ex_post", False),
    )
