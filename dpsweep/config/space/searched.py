"""Keys under `search:`, with aliases resolved and checked against the base config."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dpsweep.config.aliases import resolve_path_aliases, resolve_tree_aliases
from dpsweep.config.keys import (
    DELTA,
    EPSILON,
    LEARNING_RATE,
    NOISE_MULTIPLIER,
    SCOPE,
    TOTAL_STEP,
    format_path,
    path_of,
)
from dpsweep.config.source import KeyPath, Source, Tree, with_value
from dpsweep.config.space.derived import Derived
from dpsweep.config.space.domains import (
    BRANCHING,
    Branch,
    Choice,
    Domain,
    OneOf,
    Space,
    keys_overlap,
    list_touched_keys,
    parse_choice,
    parse_space,
)
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.data import validate_data

FIXED = {
    EPSILON: "the privacy target that all trials share",
    DELTA: "the privacy target that all trials share",
    SCOPE: "the privacy target that all trials share",
    NOISE_MULTIPLIER: "calibrated to the privacy target of each trial",
    "data": "what all trials are compared on",
    "seed": "what makes trials comparable",
}
"""Keys of a trial that a search may not vary, and what they are instead."""

EPSILON_PATH = path_of(EPSILON)
"""The one key that may vary in the base config: `{each: [1, 2, 4]}`, a budget for each trial."""


@dataclass(frozen=True)
class VariedKeys:
    """Searched keys of a sweep."""

    space: Space  # path in the trial config -> how it varies
    origins: Mapping[str, str]  # dotted key -> where errors say it stands


def read_varied_keys(file: Source, base: Source, written: Tree) -> VariedKeys:
    """The space of a sweep file whose default spaces are spelled out.

    Args:
        written: The `search` of the file as it was written.

    Raises:
        ConfigError: If a key varies twice, or must not vary.
    """
    domains, origins = dict[KeyPath, Domain](), dict[str, str]()
    for path, domain in parse_space(file).domains.items():
        typed = format_path(path) or next(k for k in BRANCHING if k in written)
        path = resolve_path_aliases(path, TrialConfig)
        key = format_path(path)
        if path in domains:
            raise ConfigError(
                f"{file.at(('search', typed))}: varies {key} a second time, once under its "
                f"letter in the paper. Delete one of the two"
            )
        domains[path] = _resolve_domain_aliases(path, domain)
        origins[key] = file.at(("search", typed)).removesuffix(typed)
        if not path:  # what its mappings touch
            place = f"{file.at(('search', typed))}: "
            origins.update(dict.fromkeys(list_touched_keys(key, domains[path]), place))
        _check_searchable(base, path, list_touched_keys(key, domains[path]), typed, origins[key])
    budgets = _read_budgets(base)
    if budgets:
        domains[EPSILON_PATH] = budgets
    return VariedKeys(Space(_override_domains(domains, file), _count_examples(base)), origins)


def _check_searchable(base: Source, path: KeyPath, keys: list[str], typed: str, place: str) -> None:
    """Raise ConfigError if what is searched has a value already, or must not vary."""
    both = [LEARNING_RATE, TOTAL_STEP]  # each takes the other's place
    names = both if format_path(path) in both else [format_path(path)]
    for name in (name for name in names if name in base.elsewhere):
        takes = (
            "is"
            if name == format_path(path)
            else f"has its place taken by {format_path(path)}, which is"
        )
        raise ConfigError(
            f"{base.at(path_of(name))}: {takes} varied by this sweep, so a fixed value would have "
            f"no effect. "
            f"Vary it otherwise with --set 'search.{typed}={{uniform: [LOW, HIGH]}}', or "
            f"delete it at {place}{typed}"
        )
    try:
        with_value(base.tree, path or ("method",), {})
    except ConfigError as e:
        raise ConfigError(f"{place}{typed}: {e}") from e
    for key, what in FIXED.items():
        if any(keys_overlap(key, key_) for key_ in keys):
            each = " or give privacy.epsilon: {each: [1, 2, 4]} there," * (key == EPSILON)
            raise ConfigError(
                f"{place}{typed}: cannot be searched: {key} is {what}. "
                f"Set it in the base config,{each} and run one sweep for each value"
            )


def _read_budgets(base: Source) -> Choice | None:
    """The budgets that trials are spread over, if the base config lists several."""
    match base.tree:
        case {"privacy": {"epsilon": {"each": budgets, **others}}} if not others:
            return Choice(
                parse_choice(base.at(EPSILON_PATH), budgets, "each").options, in_turn=True
            )
    return None


def _count_examples(base: Source) -> int:
    """Count a trial's training examples; 1 if the data are not valid, as each trial then says."""
    try:
        return validate_data(base.tree.get("data")).num_examples
    except ValueError:
        return 1


def _override_domains(domains: dict[KeyPath, Domain], file: Source) -> dict[KeyPath, Domain]:
    """Apply the keys beside a top-level one_of to all of its mappings, in place of their own."""
    whole = domains.get(())
    if not isinstance(whole, OneOf):
        return domains
    if ("method",) in domains:
        raise ConfigError(
            f"{file.at(('search', 'method'))}: stands beside one_of or each_of, which choose the "
            f"method. Delete one of the two"
        )
    branches = tuple(
        replace(branch, inner={p: d for p, d in branch.inner.items() if p not in domains})
        for branch in whole.branches
    )
    return {**domains, (): replace(whole, branches=branches)}


def _resolve_domain_aliases(path: KeyPath, domain: Domain) -> Domain:
    """The letters inside the mappings of a one_of and in formulas, replaced by fields' names."""
    if isinstance(domain, Derived):
        return replace(domain, formula=domain.formula.resolve_aliases(resolve_key_aliases))
    if not isinstance(domain, OneOf):
        return domain

    def spell_key(inner: KeyPath) -> KeyPath:
        return resolve_path_aliases((*path, *inner), TrialConfig)[len(path) :]

    branches = (
        Branch(
            branch.label,
            resolve_tree_aliases(branch.fixed, path, TrialConfig),
            {
                spell_key(p): _resolve_domain_aliases((*path, *p), d)
                for p, d in branch.inner.items()
            },
        )
        for branch in domain.branches
    )
    return OneOf(tuple(branches), domain.in_turn)


def resolve_key_aliases(key: str) -> str:
    """A dotted key of the trial config with letters replaced.

    >>> resolve_key_aliases("method.rho")
    'method.depth'
    """
    return format_path(resolve_path_aliases(path_of(key), TrialConfig))
