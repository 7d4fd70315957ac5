"""Warnings with the range to search next: the best lies at an end, or a final run did worse."""

import math
from collections.abc import Sequence

from dpsweep.config.search import ObjectiveConfig
from dpsweep.config.source import with_value
from dpsweep.config.space.domains import Range
from dpsweep.config.space.leaves import list_leaves
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.search.ranking import rank_trials
from dpsweep.search.trial_record import Record

_NEAR = 0.025
"""Share of a range, on its own scale, that counts as its end: a config that was drawn at random
lies at either end of a key with a chance of 5 %."""


def edge_warnings(sweep: ResolvedSweep, best: Record) -> list[str]:
    """A sentence for each searched range at whose end the best config lies, if it may go beyond."""
    found = []
    for leaf in list_leaves(sweep.space):
        key, domain = leaf.slot.key, leaf.domain
        value = best.hyperparams.get(key)
        here = leaf.branch is None or leaf.branch in best.hyperparams.values()
        if isinstance(domain, Range) and here and value is not None:
            share = _share(domain, value)
            if not _NEAR < share < 1 - _NEAR:
                upper = share > 0.5
                found += _warning(best, key, domain, upper=upper)
    return list(dict.fromkeys(found))


def warn_of_worse_final(
    final: Record, records: Sequence[Record], objective: ObjectiveConfig
) -> str:
    """Warn where an exploring trial did better than the final run, which has less noise.

    A step that is scaled with the noise is right where noise limits it. Where something else does,
    as large targets do in regression, the final run's step is too large.
    """
    sign = objective.sign
    values = [(sign * r.value, r.number) for r in rank_trials(records, sign) if r.value is not None]
    best, number = min(values, default=(math.inf, 0))
    if final.value is None or best >= sign * final.value:
        return ""
    return (
        f"Exploring trial {number} came to {sign * best:.4g}, which is better, though it had "
        f"more noise: the final run's step may be too large. Search smaller values of "
        f"optimizer.total_step."
    )


def _share(domain: Range, value: float) -> float:
    """Compute a value's place in the range, from 0 to 1, on its own scale."""
    if domain.is_log:
        return math.log(value / domain.low) / math.log(domain.high / domain.low)
    return (value - domain.low) / (domain.high - domain.low)


def _warning(best: Record, key: str, domain: Range, *, upper: bool) -> list[str]:
    """One sentence; none if the config takes no value beyond that end."""
    low, high = domain.low, domain.high
    if domain.is_log:
        half = math.sqrt(high / low)
        moved = (low * half, high * half) if upper else (low / half, high / half)
    else:
        half = (high - low) / 2
        moved = (low + half, high + half) if upper else (low - half, high - half)
    ends = [round(end) if domain.is_whole else float(f"{end:.3g}") for end in moved]
    tree = with_value(best.config.model_dump(mode="json"), tuple(key.split(".")), ends[upper])
    try:
        TrialConfig.model_validate(tree)
    except ValueError:  # a gain above 1, say: the end of the range is that of the key
        return []
    end = "upper" if upper else "lower"
    return [
        f"search.{key}: the best config has {best.hyperparams[key]:.3g}, at the {end} end of "
        f"[{low:g}, {high:g}]; better ones may lie beyond it. Try next: {{{domain.kind}: "
        f"[{ends[0]:g}, {ends[1]:g}]}}"
    ]
