"""The best configs, run again with fresh noise: how good they are, without selection bias.

The best of many noisy trials is better than its config deserves. When the search is through,
each of the `top` configs is trained `seeds` more times under secrets of its own, from other
weights at the start; what counts then is the mean of those runs, without the trial that was
chosen for its noise. The k-th repeat of any config starts from the same weights, so that configs,
also of different sweeps with one seed, can be compared in pairs. Every such run spends the privacy
of a trial.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from dpsweep.config.budget import ConfirmConfig
from dpsweep.config.trial import TrialConfig
from dpsweep.search.trial_record import Record


@dataclass(frozen=True)
class Confirmation:
    """Results of the repeats of one trial's config."""

    number: int  # the trial that was repeated
    values: tuple[float, ...]  # objective of each repeat that was completed
    num_failed: int  # repeats that failed

    @property
    def mean(self) -> float:
        """Of the completed repeats; there is at least one."""
        return mean(self.values)

    @property
    def spread(self) -> float:
        """Their standard deviation; 0 for a single one."""
        return stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        failed = f" ({self.num_failed} more failed)" if self.num_failed else ""
        if len(self.values) == 1:
            return f"{self.mean:.4f} in 1 run{failed}"
        return f"{self.mean:.4f} ± {self.spread:.4f} over {len(self.values)} runs{failed}"


def list_candidates(ranking: Sequence[Record], config: ConfirmConfig) -> list[Record]:
    """The first `top` of a ranking, of each group."""
    chosen: list[Record] = []
    for record in ranking:
        comparable = [c for c in chosen if get_group(c, config) == get_group(record, config)]
        if len(comparable) < config.top:
            chosen.append(record)
    return chosen


def get_group(record: Record, config: ConfirmConfig | None) -> tuple[float | None, str | None]:
    """Get the group in which a trial competes: its epsilon and, if asked for, its method."""
    apart = config is not None and config.each_method
    return record.epsilon, record.config.method.name if apart else None


def find_next_repeat(
    ranking: Sequence[Record], repeats: Sequence[Record], config: ConfirmConfig
) -> Record | None:
    """The candidate whose config is to be run next; None if all have their repeats.

    Candidates take turns, so that what a stopped sweep leaves behind is even.
    """
    left = count_missing_repeats(ranking, repeats, config)
    most = max(left.values(), default=0)
    return next(c for c in ranking if left.get(c.number) == most) if most else None


def count_missing_repeats(
    ranking: Sequence[Record], repeats: Sequence[Record], config: ConfirmConfig
) -> dict[int, int]:
    """Count the repeats that each candidate still lacks, by its number."""
    left = {c.number: config.seeds for c in list_candidates(ranking, config)}
    for repeat in repeats:
        if repeat.confirms in left:
            left[repeat.confirms] = max(0, left[repeat.confirms] - 1)
    return left


def make_repeat_config(chosen: Record, repeats: Sequence[Record]) -> TrialConfig:
    """The config of a candidate's next repeat: its own, but for the public seed.

    Where a part of the training data is held out the seed says which, and it stays: under another
    the repeats would be measured on examples that the search was trained on.
    """
    config = chosen.config
    if config.data.num_held_out:
        return config
    earlier = sum(repeat.confirms == chosen.number for repeat in repeats)
    return config.model_copy(update={"seed": config.seed + 1 + earlier})


def summarize_repeats(records: Sequence[Record]) -> dict[int, Confirmation]:
    """Summarize the repeats in `records`, by the number of the trial that was repeated."""
    ended: dict[int, list[Record]] = {}
    for record in records:
        if record.confirms is not None and not record.final and record.state != "running":
            ended.setdefault(record.confirms, []).append(record)
    found = {}
    for number, repeats in ended.items():
        values = [r.value for r in repeats if r.state == "complete" and r.value is not None]
        if values:
            found[number] = Confirmation(number, tuple(values), len(repeats) - len(values))
    return found


def final_of(records: Sequence[Record]) -> Record | None:
    """The final run, if it came to a result."""
    done = (r for r in records if r.final and r.state == "complete" and r.value is not None)
    return next(done, None)


def list_repeats(best: Record, records: Sequence[Record]) -> tuple[tuple[int, float], ...]:
    """Public seed and objective of each complete repeat of a trial; of itself, if it is final."""
    runs = [best] if best.final else [r for r in records if r.confirms == best.number]
    return tuple(
        (r.config.seed, r.value) for r in runs if r.state == "complete" and r.value is not None
    )
