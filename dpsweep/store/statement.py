"""The privacy statement of a search, from what its study knows."""

from dpsweep.privacy.statement import NO_EPSILON, format_delta, format_epsilon
from dpsweep.search.charge import (
    compute_search_privacy,
    describe_runs_privacy,
    get_charged_run,
)
from dpsweep.store.study import Study


def describe_search_privacy(study: Study, *, planned: bool = False) -> str:
    """The privacy statement of a study's search, with all that stands behind its figure.

    Args:
        study: The search.
        planned: True for all that may still be run, beside what has begun; False for what has.
    """
    records = study.records()
    promise = describe_runs_privacy(
        study.sweep,
        [get_charged_run(record) for record in records],
        confirming=sum(record.confirms is not None for record in records),
        void=study.is_void or any(record.void for record in records),
        plans=study.plans,
        ahead=study.num_planned if planned else None,
    )
    return " ".join(
        filter(None, [promise, study.sweep.config.pruner.words, _describe_warm_start(study)])
    )


def format_headline(study: Study) -> tuple[str, str]:
    """Format the search's epsilon and delta, to be read before the statement: its largest figures.

    Returns:
        Epsilon and delta; none and a dash for a void search.
    """
    records = study.records()
    if study.is_void or any(record.void for record in records):
        return NO_EPSILON, "–"
    epsilon, delta = compute_search_privacy(
        study.sweep,
        [get_charged_run(record) for record in records],
        confirming=sum(record.confirms is not None for record in records),
        plans=study.plans,
    ).largest
    return format_epsilon(epsilon), format_delta(delta)


def _describe_warm_start(study: Study) -> str:
    """Describe what the earlier sweep of a warm start adds to the statement."""
    warm = study.warm_start
    if warm is None or not study.sweep.config.sampler.learns:
        return ""
    sweeps = ", before it ".join(warm["sweeps"][::-1])
    return (
        f"Its proposals began from the results of sweep {sweeps} "
        f"on the same data ({warm['trials']} trials in the last): what was spent there is not in "
        f"this figure, and adds to it."
    )
