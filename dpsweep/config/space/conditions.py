"""Conditions between the keys of a trial: `where: "train.epochs * data.size <= 50000"`.

A condition is about the trials that have all its keys: with `one_of`, one that names method.kappa
says nothing about dp_sgd, and lets its trials pass. A key that no trial has is a mistake.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from dpsweep.config.keys import DATA_SIZE, LEARNING_RATE, TOTAL_STEP, flatten
from dpsweep.config.source import KeyPath, Source
from dpsweep.config.space.expression import Formula, FormulaError, Scalar, parse_formula
from dpsweep.config.space.searched import resolve_key_aliases
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, suggest_names

STEP_SIZES = {LEARNING_RATE: "learning_rate", TOTAL_STEP: "total_step"}
"""Keys of which a file gives one, and the trial's property that has either."""


@dataclass(frozen=True)
class Condition:
    """One formula that trials have to meet."""

    formula: Formula  # over the keys of the resolved trial config
    place: str  # file, line and key, for errors

    def holds(self, trial: TrialConfig) -> bool:
        """True if the trial meets it, or lacks one of its keys.

        Raises:
            ConfigError: If it has no answer for this trial.
        """
        values = {name: get_scalar(trial, name) for name in self.formula.names.values()}
        if None in values.values():
            return True
        try:
            return self.formula.holds(values.__getitem__)
        except FormulaError as e:
            at = ", ".join(f"{name} = {value}" for name, value in values.items())
            raise ConfigError(f"{self.place}: {self.formula.text!r} {e} (at {at})") from e


def read_conditions(file: Source, written: str | list[str]) -> tuple[Condition, ...]:
    """The conditions of a sweep file; ConfigError if one cannot be read."""
    listed: list[tuple[KeyPath, str]] = [(("where", i), text) for i, text in enumerate(written)]
    if isinstance(written, str):
        listed = [(("where",), written)] if written else []
    found = []
    for path, text in listed:
        try:
            found.append(
                Condition(parse_formula(text).resolve_aliases(resolve_key_aliases), file.at(path))
            )
        except FormulaError as e:
            raise ConfigError(f"{file.at(path)}: {e}") from e
    return tuple(found)


def check_condition_keys(conditions: Iterable[Condition], trials: Sequence[TrialConfig]) -> None:
    """Raise ConfigError for a key that none of the trials, one a corner, has a value for."""
    for condition in conditions:
        for typed, name in condition.formula.names.items():
            if all(get_scalar(trial, name) is None for trial in trials):
                known = {
                    DATA_SIZE,
                    *(key for trial in trials for key in flatten(trial.model_dump())),
                }
                raise ConfigError(
                    f"{condition.place}: unknown key {typed!r}, or one that has no value in any "
                    f"trial.{suggest_names(name, known)}"
                )


def get_scalar(trial: TrialConfig, key: str) -> Scalar | None:
    """The number or text at a dotted key; None if this trial has none."""
    if key == DATA_SIZE:
        return trial.data.num_examples
    if key in STEP_SIZES:
        return getattr(trial, STEP_SIZES[key])  # type: ignore[no-any-return]
    found: object = trial
    for part in key.split("."):
        known = isinstance(found, BaseModel) and part in type(found).model_fields
        found = getattr(found, part) if known else None
    return found if isinstance(found, int | float | str | bool) else None
