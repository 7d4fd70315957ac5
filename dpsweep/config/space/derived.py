"""Keys that follow from others, as in `optimizer.lr: {derive: "0.01 * sqrt(train.batch_size)"}`.

They are computed when all else is drawn, so a sampler never sees them. A formula may name what
the sweep searches, what another formula gives, what the base config says, and data.size. A key
left to its default has to be written in the base config first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from dpsweep.config.explain import format_value
from dpsweep.config.keys import DATA_SIZE, flatten, format_path
from dpsweep.config.source import KeyPath, Tree, with_value
from dpsweep.config.space.expression import Formula, FormulaError, parse_formula
from dpsweep.core.errors import ConfigError, suggest_names


@dataclass(frozen=True)
class Derived:
    """A value that follows from others."""

    formula: Formula  # how
    place: str  # file, line and key, for errors


def parse_derived(where: str, text: Any) -> Derived:
    """Read what stands after `derive:`; ConfigError if it is no formula."""
    if not isinstance(text, str):
        raise ConfigError(
            f"{where}: derive takes a formula in quotes, such as "
            f'"0.01 * sqrt(train.batch_size)", got {format_value(text)}'
        )
    try:
        return Derived(parse_formula(text), where)
    except FormulaError as e:
        raise ConfigError(f"{where}: {e}") from e


def compute_derived(
    tree: Tree, hyperparams: dict[str, Any], late: Mapping[KeyPath, Derived], num_examples: int
) -> tuple[Tree, dict[str, Any]]:
    """The trial's tree and hyperparams with the derived keys put in, each after those it needs.

    Raises:
        ConfigError: If a formula needs itself, or a key that is not there.
    """
    keys = {format_path(path): path for path in late}

    def lookup(name: str) -> Any:
        known = {DATA_SIZE: num_examples, **_scalars(tree)}
        if name not in known:
            raise FormulaError(
                f"unknown key {name!r}: neither searched nor written in the base config."
                f"{suggest_names(name, known)}"
            )
        return known[name]

    for key in _sort_derived(late, keys):
        derived = late[keys[key]]
        try:
            value = derived.formula.value(lookup)
        except FormulaError as e:
            raise ConfigError(f"{derived.place}: derive: {derived.formula.text!r}: {e}") from e
        tree, hyperparams = with_value(tree, keys[key], value), {**hyperparams, key: value}
    return tree, hyperparams


def _sort_derived(late: Mapping[KeyPath, Derived], keys: Mapping[str, KeyPath]) -> list[str]:
    """The derived keys, each after those its formula names."""
    needs = {
        key: [name for name in late[path].formula.names.values() if name in keys]
        for key, path in keys.items()
    }
    try:
        return list(TopologicalSorter(needs).static_order())
    except CycleError as e:
        ring = list(reversed(e.args[1]))
        raise ConfigError(
            f"{late[keys[ring[0]]].place}: derive: {' needs '.join(ring)}, and so on in a circle. "
            f"Give one of them a value of its own"
        ) from e


def _scalars(tree: Tree) -> dict[str, Any]:
    """Return the numbers, texts and truth values in a tree by dotted key."""
    return {k: v for k, v in flatten(tree).items() if isinstance(v, int | float | str | bool)}
