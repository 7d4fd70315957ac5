"""The methods' default search spaces, written into a sweep where it asks for them by name.

    search: {method: default}                     the space of the base config's method
    search: {each_of: default}                    all methods of the papers, each with its own
    search: {each_of: [disk, fftkf, {...}]}       these two and a mapping of your own

A key beside them overrides that key of a default space.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from dpsweep.config.source import Source, Tree, with_value
from dpsweep.config.space.domains import BRANCHING
from dpsweep.core.errors import ConfigError, unknown
from dpsweep.methods import METHODS, PUBLISHED

DEFAULT = "default"


def with_default_spaces(file: Source, base: Source) -> Source:
    """A sweep file with every default space spelled out.

    Raises:
        ConfigError: If a method is unknown, or the base config names none.
    """
    search = file.tree["search"]
    if search.get("method") == DEFAULT and not set(BRANCHING) & set(search):
        search = {
            **_get_base_space(file, base),
            **{k: v for k, v in search.items() if k != "method"},
        }
    for kind in BRANCHING:
        if kind in search:
            search = {**search, kind: _expand_branches(search[kind], file, ("search", kind))}
    return replace(file, tree={**file.tree, "search": search})


def get_default_space(method: str) -> Mapping[str, Any]:
    """The default space of a method, as `search:` has it."""
    return METHODS[method].space


def dump_default_space(method: str) -> str:
    """The same as lines to paste into a sweep file."""
    lines = (
        f"  {key}: {yaml.safe_dump(spec, default_flow_style=True, width=1000).strip()}"
        for key, spec in get_default_space(method).items()
    )
    return "\n".join(["search:", *lines])


def _get_base_space(file: Source, base: Source) -> Mapping[str, Any]:
    match base.tree:
        case {"method": {"name": str(name)}} if name in METHODS:
            return get_default_space(name)
        case {"method": {"compose": _}}:
            return get_default_space("compose")
    raise ConfigError(
        f"{file.at(('search', 'method'))}: default is the space of the base config's method, and "
        f"{base.at(('method',))} names none of the table. Give method: {{name: fftkf}} there"
    )


def _expand_branches(listed: Any, file: Source, path: tuple[str, ...]) -> Any:
    """The mappings of a one_of at the top, names replaced by the methods' default spaces."""
    if listed == DEFAULT:
        listed = list(PUBLISHED)
    if not isinstance(listed, list):
        return listed
    branches = []
    for i, item in enumerate(listed):
        if isinstance(item, str) and item not in METHODS:
            raise unknown("method", item, PUBLISHED, where=file.at((*path, i)))
        branches.append(_make_branch(item) if isinstance(item, str) else item)
    return branches


def _make_branch(method: str) -> Tree:
    tree: Tree = {"method": {"name": method}}
    for key, spec in get_default_space(method).items():
        tree = with_value(tree, tuple(key.split(".")), spec)
    return tree
