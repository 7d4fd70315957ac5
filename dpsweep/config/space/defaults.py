"""The methods' default search spaces, written into a sweep where it asks for them by name.

    search: {method: default}                     the space of the base config's method
    search: {each_of: default}                    all methods of the papers, each with its own
    search: {each_of: [disk, fftkf, {...}]}       these two and a mapping of your own

A key beside them overrides that key of a default space. `space: narrow` leaves the total step
alone of each, whose range goes from a quarter of the trial's default to four times it. That of
AdamBC's floor goes from an eighth of its default to eight times it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from dpsweep.config.keys import FLOOR, LEARNING_RATE, TOTAL_STEP
from dpsweep.config.privacy import GOOD_CLIP_NORM
from dpsweep.config.source import Source, Tree, with_value
from dpsweep.config.space.domains import BRANCHING
from dpsweep.config.space.start_points import DEFAULTS
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, unknown_name_error
from dpsweep.methods import METHODS, PUBLISHED
from dpsweep.methods.base import STEP_FACTOR

DEFAULT = "default"
NARROW = "narrow"
_FLOOR_FACTOR = 8.0
_SIZES = ("lr", "eta", "total_step", "r")


def with_default_spaces(file: Source, base: Source) -> Source:
    """A sweep file with every default space spelled out, and that it begins at the defaults.

    What is stored of a sweep must begin at them too, and its space has one size.

    Raises:
        ConfigError: If a method is unknown, or the base config names none.
    """
    search, others = file.tree["search"], file.tree
    if names_a_default(search):
        others = {k: v for k, v in others.items() if k != "space"}
        if others.get("accounting") != "private_selection":  # whose trials are all drawn alike
            others["start"] = others.get("start") or DEFAULTS
    if search.get("method") == DEFAULT and not set(BRANCHING) & set(search):
        method = _method_of_base(file, base)
        search = {
            **default_space_around(method, file, base),
            **{k: v for k, v in search.items() if k != "method"},
        }
    for kind in BRANCHING:
        if kind in search:
            search = {**search, kind: _expand_branches(search[kind], file, base, ("search", kind))}
    return replace(file, tree={**others, "search": search})


def names_a_default(search: Mapping[str, Any]) -> bool:
    """True if a written `search` leaves a space to a method's default."""
    listed = [search.get("method"), *(search.get(kind) for kind in BRANCHING)]
    return any(
        x == DEFAULT or (isinstance(x, list) and any(isinstance(item, str) for item in x))
        for x in listed
    )


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


def default_space_around(method: str, file: Source, base: Source) -> dict[str, Any]:
    """A method's default space with the total step around the default of this base config.

    Where the base has several epsilons, from the least to the largest. Under `scope: sweep` it is
    that of a trial's share, as composition gives it: by the root of the number of trials. AdamBC's
    floor goes with the square of the noise.
    """
    space = dict(get_default_space(method))
    if file.tree.get("space") == NARROW:
        space = {TOTAL_STEP: space[TOTAL_STEP]}
    if {LEARNING_RATE, "optimizer.eta"} & set(file.tree["search"]):
        del space[TOTAL_STEP]  # searched beside it, in its place
        return space
    trials = _base_trials(method, base.tree)
    if not trials:
        return space
    shares, num = 1, file.tree.get("budget", {}).get("trials")
    if base.tree["privacy"].get("scope") == "sweep" and isinstance(num, int) and num > 0:
        shares = num
    steps = [trial.default_total_step for trial in trials]
    space[TOTAL_STEP] = _spread(steps, STEP_FACTOR, lower=math.sqrt(shares))
    if FLOOR in space:  # at the clip norm of the first trial
        floors = [trial.with_clip_norm(GOOD_CLIP_NORM).default_floor for trial in trials]
        space[FLOOR] = _spread(floors, _FLOOR_FACTOR, higher=shares)
    return space


def _spread(
    values: list[float], factor: float, lower: float = 1, higher: float = 1
) -> dict[str, list[float]]:
    """A range around some values, with ends of three digits."""
    ends = min(values) / factor / lower, max(values) * factor * higher
    return {"log_uniform": [float(f"{x:.3g}") for x in ends]}


def _base_trials(method: str, tree: Tree) -> list[TrialConfig]:
    """The base config at each epsilon, no size given; none if it is no trial yet, as others say."""
    own = {k: v for k, v in tree.get("optimizer", {}).items() if k not in ("name", *_SIZES)}
    section = tree.get("method", {})
    if section.get("name") != method and "compose" not in section:
        section = {"name": method}
    tree = {**tree, "method": section, "optimizer": own}
    epsilon = tree.get("privacy", {}).get("epsilon")
    each = epsilon.get("each", []) if isinstance(epsilon, dict) else [epsilon]
    found = []
    for one in each:
        try:
            found.append(TrialConfig.model_validate(with_value(tree, ("privacy", "epsilon"), one)))
        except (ValueError, ConfigError):
            continue
    return found


def _method_of_base(file: Source, base: Source) -> str:
    match base.tree:
        case {"method": {"name": str(name)}} if name in METHODS:
            return name
        case {"method": {"compose": _}}:
            return "compose"
    raise ConfigError(
        f"{file.at(('search', 'method'))}: default is the space of the base config's method, and "
        f"{base.at(('method',))} names none of the table. Give method: {{name: fftkf}} there"
    )


def _expand_branches(listed: Any, file: Source, base: Source, path: tuple[str, ...]) -> Any:
    """The mappings of a one_of at the top, names replaced by the methods' default spaces."""
    if listed == DEFAULT:
        listed = list(PUBLISHED)
    if not isinstance(listed, list):
        return listed
    branches = []
    for i, item in enumerate(listed):
        if isinstance(item, str) and item not in METHODS:
            raise unknown_name_error("method", item, PUBLISHED, where=file.at((*path, i)))
        whole = isinstance(item, str)
        branches.append(
            _make_branch(item, default_space_around(item, file, base)) if whole else item
        )
    return branches


def _make_branch(method: str, space: Mapping[str, Any]) -> Tree:
    tree: Tree = {"method": {"name": method}}
    for key, spec in space.items():
        tree = with_value(tree, tuple(key.split(".")), spec)
    return tree
