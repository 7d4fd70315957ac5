"""The `search:` part of a sweep: which keys vary, over what.

    method.kappa:     {uniform: [0.3, 1.0]}            a real number
    optimizer.lr:     {log_uniform: [0.05, 5]}         a real number, even on a log scale
    model.width:      {integer: [8, 32]}               a whole number
    train.batch_size: {choice: [500, 1000, 2000]}      one of a list
    optimizer.lr:     {derive: "0.01 * sqrt(train.batch_size)"}    follows from other keys
    method:           {one_of: [{name: disk, kappa: {uniform: [0.3, 1]}}, {name: dp_sgd}]}

The last replaces the whole of `method` by one of the mappings; what varies inside a mapping
is searched only when that mapping is chosen. `each_of` is the same in turn, so that all get
equally many trials. At the top, without a key, the mappings are parts of the whole trial:

    each_of: [{method: {name: disk}, optimizer: {lr: {log_uniform: [0.1, 10]}}}, ...]
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import JsonValue

from dpsweep.config.explain import format_value
from dpsweep.config.keys import flatten, format_path
from dpsweep.config.source import KeyPath, Source, Tree, with_value
from dpsweep.config.space.derived import Derived, compute_derived, parse_derived
from dpsweep.core.errors import ConfigError, suggest_names

RangeKind = Literal["uniform", "log_uniform", "integer", "log_integer"]
RANGES: tuple[RangeKind, ...] = ("uniform", "log_uniform", "integer", "log_integer")
BRANCHING = ("one_of", "each_of")
DERIVE = "derive"
KINDS = (*RANGES, "choice", *BRANCHING, DERIVE)

DOMAIN_SCHEMAS: list[JsonValue] = [
    {
        "type": "object",
        "required": [kind],
        "properties": {kind: {"type": "string" if kind == DERIVE else "array"}},
    }
    for kind in KINDS
]
"""Build the JSON schema of a search key's value, for editors."""


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`, both included."""

    kind: RangeKind
    low: float
    high: float

    @property
    def is_whole(self) -> bool:
        """True for whole numbers."""
        return self.kind.endswith("integer")

    @property
    def is_log(self) -> bool:
        """True if equal ratios are equally likely."""
        return self.kind.startswith("log")


@dataclass(frozen=True)
class Choice:
    """One of some values; YAML scalars, lists or mappings."""

    options: tuple[Any, ...]  # the values
    in_turn: bool = False  # True if each gets as many trials as the others, whatever the sampler

    @property
    def labels(self) -> tuple[str | int | float | bool, ...]:
        """The options as a database keeps them: scalars as they are, the rest as JSON."""
        scalar = (str, int, float, bool)
        return tuple(o if isinstance(o, scalar) else json.dumps(o) for o in self.options)


@dataclass(frozen=True)
class Branch:
    """One mapping of a `one_of`, with what varies inside it."""

    label: str
    fixed: Tree
    inner: Mapping[KeyPath, "Domain"]


@dataclass(frozen=True)
class OneOf:
    """One of several mappings, each with a space of its own."""

    branches: tuple[Branch, ...]  # the mappings
    in_turn: bool = False  # True if each gets as many trials as the others, whatever the sampler


Domain = Range | Choice | OneOf | Derived
Labels = tuple[str | int | float | bool, ...]


@dataclass(frozen=True)
class Slot:
    """Key and name that a value is drawn for."""

    name: str  # in the study; that of a key inside a branch has the branch in it
    key: str  # dotted key of the trial config, as the trial's hyperparams have it


class Draw(Protocol):
    """Whoever picks the values: an Optuna trial, or a check that walks the corners."""

    def number(self, slot: Slot, domain: Range) -> float | int:
        """A number in the range."""

    def option(self, slot: Slot, labels: Labels) -> int:
        """Index of one of the labels."""

    def choose_label(self, slot: Slot, labels: Labels) -> int:
        """Index of one of the labels, each as often as the others."""


@dataclass(frozen=True)
class Space:
    """Searched keys, by path in the trial config."""

    domains: Mapping[KeyPath, Domain]  # path -> how it varies
    num_examples: int = 0  # what a formula knows as data.size

    def draw(self, base: Tree, draw: Draw) -> tuple[Tree, dict[str, Any]]:
        """`base` with every searched key drawn, and the drawn values by dotted key.

        What goes in turn is drawn first, then what stands at the top, then the rest in the order
        of the file; what follows from other keys is computed at the end.

        Raises:
            ConfigError: If a derived value has no value here.
        """
        tree, hyperparams, late = base, dict[str, Any](), dict[KeyPath, Derived]()
        for path, domain in sorted(self.domains.items(), key=_draw_order):
            if isinstance(domain, Derived):
                late[path] = domain
                continue
            value = _draw_domain(format_path(path), path, domain, draw, hyperparams, late)
            tree = with_value(tree, path, value) if path else merge_trees(tree, value)
        tree, hyperparams = compute_derived(tree, hyperparams, late, self.num_examples)
        return _keep_drawn_step(tree, hyperparams), hyperparams

    @property
    def is_conditional(self) -> bool:
        """True if some keys are searched only for some values of others."""
        return any(isinstance(domain, OneOf) for domain in self.domains.values())


def _keep_drawn_step(tree: Tree, hyperparams: Mapping[str, Any]) -> Tree:
    """A drawn tree in which a searched lr takes the place of the base's total_step, or vice versa.

    Both are one quantity: what is searched has the value that the base config had.
    """
    drawn = [key for key in ("lr", "total_step") if f"optimizer.{key}" in hyperparams]
    match tree:
        case {"optimizer": {"lr": _, "total_step": _, **others} as own} if len(drawn) == 1:
            return {**tree, "optimizer": {**others, drawn[0]: own[drawn[0]]}}
    return tree


def _draw_order(item: tuple[KeyPath, Domain]) -> tuple[bool, bool]:
    path, domain = item
    return not (isinstance(domain, Choice) and domain.in_turn), path != ()


def _draw_domain(
    name: str,
    path: KeyPath,
    domain: Range | Choice | OneOf,
    draw: Draw,
    hyperparams: dict[str, Any],
    late: dict[KeyPath, Derived],
) -> Any:
    place = format_path(path)
    if isinstance(domain, Range):
        hyperparams[place] = draw.number(Slot(name, place), domain)
        return hyperparams[place]
    if isinstance(domain, Choice):
        pick = draw.choose_label if domain.in_turn else draw.option
        hyperparams[place] = domain.options[pick(Slot(name, place), domain.labels)]
        return hyperparams[place]
    labels = tuple(branch.label for branch in domain.branches)
    key = f"{place or 'method'}.name"
    pick = draw.choose_label if domain.in_turn else draw.option
    branch = domain.branches[pick(Slot(name or "one_of", key), labels)]
    hyperparams[key] = branch.label
    tree = branch.fixed
    for inner, inner_domain in branch.inner.items():
        if isinstance(inner_domain, Derived):
            late[(*path, *inner)] = inner_domain
            continue
        inner_name = f"{name or 'one_of'}.{branch.label}.{format_path(inner)}"
        value = _draw_domain(inner_name, (*path, *inner), inner_domain, draw, hyperparams, late)
        tree = with_value(tree, inner, value)
    return tree


def parse_space(source: Source) -> Space:
    """Read the `search:` mapping of a file.

    Raises:
        ConfigError: For a kind, range or list that makes no sense.
    """
    path, search = ("search",), source.tree["search"]
    if not search:
        raise ConfigError(
            f"{source.at(path)}: is empty. Name at least one key to vary, such as "
            f"optimizer.lr: {{log_uniform: [0.05, 5]}}"
        )
    domains: dict[KeyPath, Domain] = {}
    for key, spec in search.items():
        if not key:
            raise ConfigError(f"{source.at(path)}: has an empty key. Name what varies")
        if key in BRANCHING:
            if () in domains:
                raise ConfigError(
                    f"{source.at((*path, key))}: one_of and each_of stand side by side. Keep one"
                )
            domains[()] = _parse_one_of(source, (*path, key), spec)
        else:
            domains[tuple(key.split("."))] = _parse_domain(source, (*path, key), spec)
    return Space(domains)


def merge_trees(tree: Tree, part: Tree) -> Tree:
    """`tree` with `part` laid over it; what names a whole thing replaces, the rest is merged."""
    result = dict(tree)
    for key, value in part.items():
        old = tree.get(key)
        part_of_it = isinstance(value, dict) and not {"name", "compose"} & set(value)
        if isinstance(old, dict) and part_of_it:
            value = merge_trees(old, value)
        result[key] = value
    return result


def _parse_domain(source: Source, path: KeyPath, spec: Any) -> Domain:
    where = source.at(path)
    key = path[-1]
    if isinstance(spec, list) and spec:
        listed = format_value(spec)
        between = f", or for any value between, {{uniform: {listed}}}" if len(spec) == 2 else ""
        raise ConfigError(
            f"{where}: expected one way to vary it, got the list {listed}. To try each of these "
            f"values, write {{choice: {listed}}}{between}"
        )
    if not isinstance(spec, dict) or len(spec) != 1:
        raise ConfigError(
            f"{where}: expected one way to vary it, such as {{uniform: [0.1, 1]}}, got "
            f"{format_value(spec)}. To set it for all trials, write it in the base config"
        )
    ((kind, values),) = spec.items()
    if kind not in KINDS:
        hint = f" For a key inside {key}, write {key}.{kind}." if isinstance(values, dict) else ""
        raise ConfigError(
            f"{where}: unknown way to vary {kind!r}.{hint}{suggest_names(kind, KINDS)}"
        )
    if kind in BRANCHING:
        return _parse_one_of(source, (*path, kind), values)
    if kind == "choice":
        return parse_choice(where, values)
    if kind == DERIVE:
        return parse_derived(where, values)
    return _parse_range(where, kind, values)


def _parse_range(where: str, kind: RangeKind, values: Any) -> Range:
    numbers = isinstance(values, list) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    )
    if not numbers or len(values) != 2:
        raise ConfigError(
            f"{where}: {kind} takes two numbers [low, high], got {format_value(values)}"
        )
    low, high = values
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"{where}: {kind} needs finite numbers, got [{low}, {high}]")
    if low >= high:
        shape = "empty" if low == high else "reversed"
        fix = f"set {low} in the base config" if low == high else f"write [{high}, {low}]"
        raise ConfigError(f"{where}: the range [{low}, {high}] is {shape}; {fix}")
    if kind.startswith("log") and low <= 0:
        raise ConfigError(
            f"{where}: {kind} needs a low end above 0, got [{low}, {high}]. Start at a small "
            f"positive number such as {high / 1000:g}, or use {kind.removeprefix('log_')}"
        )
    if kind.endswith("integer") and not (isinstance(low, int) and isinstance(high, int)):
        raise ConfigError(f"{where}: {kind} needs whole numbers, got [{low}, {high}]")
    return Range(kind, low, high)


def parse_choice(where: str, values: Any, kind: str = "choice") -> Choice:
    """One of a list of values; `where` and `kind` are what errors call it."""
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: {kind} takes a list of values, got {format_value(values)}")
    doubled = [v for i, v in enumerate(values) if v in values[:i]]
    if doubled:
        raise ConfigError(f"{where}: {kind} lists {format_value(doubled[0])} twice. Delete one")
    if None in values:
        raise ConfigError(f"{where}: {kind} lists an empty value; write it out or delete it")
    return Choice(tuple(values))


def _parse_one_of(source: Source, path: KeyPath, values: Any) -> OneOf:
    where = source.at(path)
    at_top = len(path) == 2  # names are spelled out by then; see config/space/defaults.py
    if not isinstance(values, list) or not all(isinstance(v, dict) and v for v in values):
        such = "methods, such as [disk, dp_sgd]" if at_top else "mappings, such as [{name: disk}]"
        raise ConfigError(f"{where}: takes a list of {such}, got {format_value(values)}")
    branches = []
    for i, tree in enumerate(values):
        inner: dict[KeyPath, Domain] = {}
        fixed = _split_branch(source, (*path, i), (), tree, inner)
        branches.append(Branch(_label_branch(tree, i), fixed, inner))
    labels = [branch.label for branch in branches]
    doubled = [label for i, label in enumerate(labels) if label in labels[:i]]
    if not labels:
        raise ConfigError(f"{where}: the list is empty. Name at least one to choose from")
    if doubled:
        raise ConfigError(
            f"{where}: two mappings are called {doubled[0]!r}. Keep one, and vary inside it"
        )
    return OneOf(tuple(branches), in_turn=path[-1] == "each_of")


def _label_branch(tree: Tree, index: int) -> str:
    """Name a mapping: by its name, that of its method, or its place in the list."""
    match tree:
        case {"name": str(name)} | {"method": {"name": str(name)}}:
            return name
        case {"compose": _} | {"method": {"compose": _}}:
            return "compose"
    return str(index)


def _split_branch(
    source: Source, where: KeyPath, path: KeyPath, tree: Tree, inner: dict[KeyPath, Domain]
) -> Tree:
    """Return a branch's fixed part; put the searched part into `inner`, by path in the branch."""
    fixed: Tree = {}
    for key, value in tree.items():
        here = (*path, key)
        if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in KINDS:
            inner[here] = _parse_domain(source, (*where, *here), value)
        elif isinstance(value, dict):
            fixed[key] = _split_branch(source, where, here, value, inner)
        else:
            fixed[key] = value
    return fixed


def list_touched_keys(key: str, domain: Domain) -> list[str]:
    """Dotted keys of the trial that a search key changes."""
    if key or not isinstance(domain, OneOf):
        return [key]
    # an empty mapping has only what varies, and changes nothing itself
    fixed = [k for b in domain.branches for k, value in flatten(b.fixed).items() if value != {}]
    inner = [format_path(path) for branch in domain.branches for path in branch.inner]
    return [*fixed, *inner]


def keys_overlap(one: str, other: str) -> bool:
    """True if one of two dotted keys is the other or lies inside it."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
