"""The papers' letters, spelled out: `method.rho` in a file is the field `method.depth`.

Done before anything is merged, so that a search over `method.depth` meets the `rho` of its
base config as the same key.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import BaseModel

from dpsweep.config.explain import iter_models
from dpsweep.config.source import KeyPath, Source

Models = list[type[BaseModel]]


def resolve_path_aliases(path: KeyPath, model: type[BaseModel]) -> KeyPath:
    """`path` of a config of class `model` with letters replaced by field names.

    >>> from dpsweep.config.trial import TrialConfig
    >>> resolve_path_aliases(("method", "rho"), TrialConfig)
    ('method', 'depth')
    """
    names: list[str | int] = []
    models = [model]
    for part in path:
        names.append(_collect_aliases(models).get(str(part), part))
        models = _list_nested_models(models, names[-1])
    return tuple(names)


def resolve_source_aliases(source: Source, model: type[BaseModel]) -> Source:
    """`source` with every letter replaced, in its values and in its lines.

    A mapping that gives a field both ways keeps both, for validation to refuse.
    """
    return replace(
        source,
        tree=_resolve_tree(source.tree, [model]),
        lines={resolve_path_aliases(path, model): line for path, line in source.lines.items()},
    )


def resolve_tree_aliases(tree: Any, path: KeyPath, model: type[BaseModel]) -> Any:
    """A part of a config of class `model` that stands at `path`, with letters replaced."""
    models = [model]
    for part in path:
        models = _list_nested_models(models, part)
    return _resolve_tree(tree, models)


def _resolve_tree(tree: Any, models: Models) -> Any:
    if isinstance(tree, list):
        return [_resolve_tree(item, models) for item in tree]
    if not isinstance(tree, dict):
        return tree
    letters = _collect_aliases(models)
    spelled = {}
    for key, value in tree.items():
        name = letters.get(key, key)
        kept = key if name in tree else name
        spelled[kept] = _resolve_tree(value, _list_nested_models(models, name))
    return spelled


def _collect_aliases(models: Models) -> Mapping[str, str]:
    return {
        letter: name for model in models for letter, name in getattr(model, "letters", {}).items()
    }


def _list_nested_models(models: Models, part: str | int) -> Models:
    if str(part).isdigit():  # one item of a list
        return models
    return [inner for model in models for inner in _list_field_models(model, str(part))]


@cache  # a class is walked once, and not once for each of a sweep's trials
def _list_field_models(model: type[BaseModel], key: str) -> tuple[type[BaseModel], ...]:
    field = model.model_fields.get(key)
    return tuple(iter_models(field.annotation)) if field else ()
