"""Methods and sweeps side by side: what each came to, and whether a difference is noise.

What is compared are groups: the trials of one sweep with one method at one epsilon. A group stands
for its best config, and that one for its repeats (`confirm`): the best of many noisy trials is
overstated by chance, and nothing is tested on it. Words and tables are comparison.py's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpsweep.config.keys import BATCH_SIZE, CLIP_NORM, EPOCHS, LEARNING_RATE, METHOD_NAME
from dpsweep.config.space.conditions import STEP_SIZES
from dpsweep.core.errors import ConfigError, unknown_name_error
from dpsweep.results.groups import PrivacyTarget, TrialGroup, groups_of
from dpsweep.results.significance import Gap, gap_between, holm
from dpsweep.store.study import Study

_COMMON_KEYS = (LEARNING_RATE, BATCH_SIZE, EPOCHS, CLIP_NORM)
"""Keys that any method can be searched over: an even comparison searches the same for all."""


@dataclass(frozen=True)
class Compared:
    """One group against the reference of its epsilon."""

    label: str
    reference: str  # the other
    target: PrivacyTarget  # epsilon of both
    gap: Gap  # TrialGroup less reference
    better: bool  # True if the difference is in the group's favour
    p: float | None  # corrected for the number of comparisons (Holm); None if there is none
    # leads between two such searches of equally good methods are smaller than that, 19 times in 20
    # by their model and about 9 in 10 as measured; None with few trials
    chance_lead: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Groups that may be compared, and how they do."""

    groups: tuple[TrialGroup, ...]  # by epsilon, the smallest first, then the best mean first
    compared: tuple[Compared, ...]  # every group with repeats but the references
    chosen: bool  # True if the references are the best by these same repeats

    def by_target(self) -> list[list[TrialGroup]]:
        """Groups of one target together."""
        found: dict[Any, list[TrialGroup]] = {}
        for group in self.groups:
            found.setdefault(group.target, []).append(group)
        return list(found.values())


def compare(
    groups: Sequence[TrialGroup], reference: str | None = None, *, any_model: bool = False
) -> Comparison:
    """Put groups side by side.

    Args:
        groups: Of all sweeps.
        reference: What every other group is tested against: a label, a method or a sweep. The best
            mean of each epsilon if None.
        any_model: True if they may have trained different models.

    Raises:
        ConfigError: If they were not after the same thing, or there is no such reference.
    """
    check_comparable(groups, any_model=any_model)
    labelled = _sort_groups(_label_groups(groups))
    pairs = list(_pairs(labelled, reference))
    gaps = [gap_between(group.repeats, other.repeats) for group, other in pairs]
    compared = tuple(
        Compared(
            label=group.label,
            reference=other.label,
            target=group.target,
            gap=gap,
            better=group.sign * gap.difference < 0,
            p=p,
            chance_lead=_compute_chance_lead(group, other),
        )
        for (group, other), gap, p in zip(pairs, gaps, holm([gap.p for gap in gaps]), strict=True)
    )
    return Comparison(tuple(labelled), compared, chosen=reference is None)


def _compute_chance_lead(one: TrialGroup, other: TrialGroup) -> float | None:
    if one.selection_bias is None or other.selection_bias is None:
        return None
    return 1.96 * math.hypot(one.selection_bias.spread, other.selection_bias.spread)


def compare_methods(study: Study) -> Comparison | None:
    """Compare the methods of one sweep at each epsilon; None if it searched over fewer than two."""
    records = study.records()
    if len({r.hyperparams[METHOD_NAME] for r in records if METHOD_NAME in r.hyperparams}) < 2:
        return None
    return compare(groups_of(study, ""), any_model=True)


def check_comparable(groups: Sequence[TrialGroup], *, any_model: bool = False) -> None:
    """Raise ConfigError if two groups differ in metric, data or (unless `any_model`) in model."""
    first = groups[0]
    asked: list[tuple[str, Callable[[TrialGroup], Any]]] = [
        ("metric", lambda group: group.metric),
        ("data", lambda group: group.data),
    ]
    for other in groups[1:]:
        for what, of in asked:
            if of(other) != of(first):
                raise _apart(what, first, other, of(first), of(other))
        shared = first.model.keys() & other.model.keys()
        apart = {key for key in shared if first.model[key] != other.model[key]}
        if apart and not any_model:
            mine, theirs = ({k: group.model[k] for k in sorted(apart)} for group in (first, other))
            error = _apart("model", first, other, mine, theirs)
            raise ConfigError(f"{error}, or add --any-model")


def _apart(what: str, one: TrialGroup, other: TrialGroup, mine: Any, theirs: Any) -> ConfigError:
    return ConfigError(
        f"{what}: {one.method} (sweep {one.sweep}) has {_format_value(mine)} and {other.method} "
        f"(sweep {other.sweep}) {_format_value(theirs)}: their results are about different things. "
        f"Compare sweeps with one {what}"
    )


def _format_value(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{k}: {v}" for k, v in value.items())


def uneven(peers: Sequence[TrialGroup]) -> list[str]:
    """In which ways groups of one epsilon were not given the same, a sentence each."""
    asked: list[tuple[str, Callable[[TrialGroup], Any]]] = [
        ("trials", lambda group: "secret" if group.trials is None else group.trials),
        ("delta", lambda group: f"{group.delta:.3g}"),
        ("epochs", lambda group: " to ".join(f"{e:g}" for e in dict.fromkeys(group.epochs))),
        ("repeats", lambda group: len(group.repeats)),
        ("configs that were repeated", lambda group: group.num_confirmed),
        ("model", lambda group: _format_value(group.model)),
        ("accounting", lambda group: group.accounting),
    ]
    for key in _COMMON_KEYS:
        asked.append((f"a search over {key}", _searches(key)))
    found = []
    for what, of in asked:
        by_value: dict[Any, list[str]] = {}
        for group in peers:
            by_value.setdefault(of(group), []).append(group.label)
        if len(by_value) > 1:
            parts = "; ".join(f"{value}: {', '.join(labels)}" for value, labels in by_value.items())
            found.append(f"not equal: {what} ({parts})")
            if what == "trials" and len({group.sweep for group in peers}) == 1:
                found[-1] += "; each_of gives all the same number, if budget.trials is a multiple"
    return found


def _searches(key: str) -> Callable[[TrialGroup], str]:
    keys = set(STEP_SIZES) if key in STEP_SIZES else {key}
    return lambda group: "no" if keys.isdisjoint(group.searched) else "yes"


def _label_groups(groups: Sequence[TrialGroup]) -> list[TrialGroup]:
    """Groups by their methods or, where two of one epsilon have the same, with sweep and folder."""
    for longer in (
        lambda group: group.method,
        lambda group: f"{group.sweep}/{group.method}",
        lambda group: f"{group.folder}:{group.sweep}/{group.method}",
    ):
        named = [replace(group, label=longer(group)) for group in groups]
        if len({(group.target, group.label) for group in named}) == len(groups):
            return named
    raise ConfigError(
        f"sweep {groups[0].sweep!r} is named twice. Name each sweep once, or give the state "
        f"folders it is in as --state FOLDER"
    )


def _sort_groups(groups: list[TrialGroup]) -> list[TrialGroup]:
    def place(group: TrialGroup) -> tuple[Any, ...]:
        epsilon, scope, noise = group.target
        figure = (
            group.mean if group.mean is not None else (group.best.value if group.best else None)
        )
        return (
            (epsilon is None, epsilon or 0.0, scope, noise or 0.0),
            group.mean is None,
            figure is None,
            group.sign * (figure or 0.0),
        )

    return sorted(groups, key=place)


def _pairs(
    groups: list[TrialGroup], reference: str | None
) -> Iterable[tuple[TrialGroup, TrialGroup]]:
    """Every group with repeats, and the reference of its epsilon."""
    if reference is not None:
        _check_known(groups, reference)
    for target in dict.fromkeys(group.target for group in groups):
        peers = [group for group in groups if group.target == target and group.repeats]
        others = [group for group in peers if reference is None or _is_named(group, reference)]
        if len(others) > 1 and reference is not None:
            raise ConfigError(
                f"--reference {reference}: means {' and '.join(group.label for group in others)}. "
                f"Name one of them"
            )
        yield from ((group, others[0]) for group in peers if others and group is not others[0])


def _check_known(groups: list[TrialGroup], reference: str) -> None:
    if not any(_is_named(group, reference) for group in groups):
        raise unknown_name_error(
            "group", reference, {group.label for group in groups}, where="--reference"
        )


def _is_named(group: TrialGroup, name: str) -> bool:
    return name in (group.label, group.method, group.sweep)
