"""Methods and sweeps side by side: what each came to, and whether a difference is noise.

What is compared are arms: the trials of one sweep with one method at one epsilon. An arm stands
for its best config, and that one for its repeats (`confirm`): the best of many noisy trials is
lucky, and nothing is tested on it. Words and tables are side_by_side.py's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpsweep.core.errors import ConfigError, unknown
from dpsweep.results.groups import Arm, Promise
from dpsweep.results.significance import Gap, gap_between, holm

_COMMON_KEYS = ("optimizer.lr", "train.batch_size", "train.epochs", "privacy.clip_norm")
"""What any method can be searched over: an even comparison searches the same of them for all."""


@dataclass(frozen=True)
class Compared:
    """One arm against the reference of its epsilon.

    Attributes:
        label: The arm.
        reference: The other.
        promise: Epsilon of both.
        gap: Arm less reference.
        better: True if the difference is in the arm's favour.
        p: Corrected for the number of comparisons (Holm); None if there is none.
    """

    label: str
    reference: str
    promise: Promise
    gap: Gap
    better: bool
    p: float | None


@dataclass(frozen=True)
class Comparison:
    """Arms that may be compared, and how they do.

    Attributes:
        arms: By epsilon, the smallest first, then the best mean first.
        compared: Every arm with repeats but the references.
        chosen: True if the references are the best by these same repeats.
    """

    arms: tuple[Arm, ...]
    compared: tuple[Compared, ...]
    chosen: bool

    def groups(self) -> list[list[Arm]]:
        """Arms of one promise together."""
        found: dict[Any, list[Arm]] = {}
        for arm in self.arms:
            found.setdefault(arm.promise, []).append(arm)
        return list(found.values())


def compare(
    arms: Sequence[Arm], reference: str | None = None, *, any_model: bool = False
) -> Comparison:
    """Puts arms side by side.

    Args:
        arms: Of all sweeps.
        reference: What every other arm is tested against: a label, a method or a sweep. The best
            mean of each epsilon if None.
        any_model: True if they may have trained different models.

    Raises:
        ConfigError: If they were not after the same thing, or there is no such reference.
    """
    check_comparable(arms, any_model=any_model)
    labelled = _ordered(_labelled(arms))
    pairs = list(_pairs(labelled, reference))
    gaps = [gap_between(arm.repeats, other.repeats) for arm, other in pairs]
    compared = tuple(
        Compared(
            label=arm.label,
            reference=other.label,
            promise=arm.promise,
            gap=gap,
            better=arm.sign * gap.difference < 0,
            p=p,
        )
        for (arm, other), gap, p in zip(pairs, gaps, holm([gap.p for gap in gaps]), strict=True)
    )
    return Comparison(tuple(labelled), compared, chosen=reference is None)


def check_comparable(arms: Sequence[Arm], *, any_model: bool = False) -> None:
    """Raises ConfigError if two arms differ in metric, data or (unless `any_model`) in model."""
    first = arms[0]
    asked: list[tuple[str, Callable[[Arm], Any]]] = [
        ("metric", lambda arm: arm.metric),
        ("data", lambda arm: arm.data),
    ]
    for other in arms[1:]:
        for what, of in asked:
            if of(other) != of(first):
                raise _apart(what, first, other, of(first), of(other))
        shared = first.model.keys() & other.model.keys()
        apart = {key for key in shared if first.model[key] != other.model[key]}
        if apart and not any_model:
            mine, theirs = ({k: arm.model[k] for k in sorted(apart)} for arm in (first, other))
            error = _apart("model", first, other, mine, theirs)
            raise ConfigError(f"{error}, or add --any-model")


def _apart(what: str, one: Arm, other: Arm, mine: Any, theirs: Any) -> ConfigError:
    return ConfigError(
        f"{what}: {one.method} (sweep {one.sweep}) has {_shown(mine)} and {other.method} (sweep "
        f"{other.sweep}) {_shown(theirs)}: their results are about different things. Compare "
        f"sweeps with one {what}"
    )


def _shown(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{k}: {v}" for k, v in value.items())


def uneven(group: Sequence[Arm]) -> list[str]:
    """In which ways arms of one epsilon were not given the same, a sentence each."""
    asked: list[tuple[str, Callable[[Arm], Any]]] = [
        ("trials", lambda arm: "secret" if arm.trials is None else arm.trials),
        ("delta", lambda arm: f"{arm.delta:.3g}"),
        ("epochs", lambda arm: " to ".join(f"{e:g}" for e in dict.fromkeys(arm.epochs))),
        ("repeats", lambda arm: len(arm.repeats)),
        ("configs that were repeated", lambda arm: arm.num_confirmed),
        ("model", lambda arm: _shown(arm.model)),
        ("accounting", lambda arm: arm.accounting),
    ]
    for key in _COMMON_KEYS:
        asked.append((f"a search over {key}", _searches(key)))
    found = []
    for what, of in asked:
        by_value: dict[Any, list[str]] = {}
        for arm in group:
            by_value.setdefault(of(arm), []).append(arm.label)
        if len(by_value) > 1:
            parts = "; ".join(f"{value}: {', '.join(labels)}" for value, labels in by_value.items())
            found.append(f"not equal: {what} ({parts})")
    return found


def _searches(key: str) -> Callable[[Arm], str]:
    return lambda arm: "yes" if key in arm.searched else "no"


def _labelled(arms: Sequence[Arm]) -> list[Arm]:
    """Arms by their methods or, where two of one epsilon have the same, with sweep and folder."""
    for longer in (
        lambda arm: arm.method,
        lambda arm: f"{arm.sweep}/{arm.method}",
        lambda arm: f"{arm.folder}:{arm.sweep}/{arm.method}",
    ):
        named = [replace(arm, label=longer(arm)) for arm in arms]
        if len({(arm.promise, arm.label) for arm in named}) == len(arms):
            return named
    raise ConfigError(
        f"sweep {arms[0].sweep!r} is named twice. Name each sweep once, or give the state folders "
        f"it is in as --state FOLDER"
    )


def _ordered(arms: list[Arm]) -> list[Arm]:
    def place(arm: Arm) -> tuple[Any, ...]:
        epsilon, scope, noise = arm.promise
        figure = arm.mean if arm.mean is not None else (arm.best.value if arm.best else None)
        return (
            (epsilon is None, epsilon or 0.0, scope, noise or 0.0),
            arm.mean is None,
            figure is None,
            arm.sign * (figure or 0.0),
        )

    return sorted(arms, key=place)


def _pairs(arms: list[Arm], reference: str | None) -> Iterable[tuple[Arm, Arm]]:
    """Every arm with repeats, and the reference of its epsilon."""
    if reference is not None:
        _check_known(arms, reference)
    for promise in dict.fromkeys(arm.promise for arm in arms):
        group = [arm for arm in arms if arm.promise == promise and arm.repeats]
        others = [arm for arm in group if reference is None or _is_named(arm, reference)]
        if len(others) > 1 and reference is not None:
            raise ConfigError(
                f"--reference {reference}: means {' and '.join(arm.label for arm in others)}. "
                f"Name one of them"
            )
        yield from ((arm, others[0]) for arm in group if others and arm is not others[0])


def _check_known(arms: list[Arm], reference: str) -> None:
    if not any(_is_named(arm, reference) for arm in arms):
        raise unknown("arm", reference, {arm.label for arm in arms}, where="--reference")


def _is_named(arm: Arm, name: str) -> bool:
    return name in (arm.label, arm.method, arm.sweep)
