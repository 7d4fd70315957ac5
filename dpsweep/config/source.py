"""YAML with line numbers, and configs from it whose errors name file, line, key and remedy."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from dpsweep.config.explain import explain_error, format_value
from dpsweep.core.errors import ConfigError

KeyPath = tuple[str | int, ...]
Tree = dict[str, Any]
Model = TypeVar("Model")


_MOST_NODES = 100_000
"""Values of a file, each counted where it stands."""

_MOST_BYTES = 2_000_000
_LARGEST = 2**63
_PLAIN_TAGS = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


@dataclass(frozen=True)
class Source:
    """A YAML file as it was written."""

    name: str  # what errors call it: the path as the user gave it
    tree: Tree  # its content
    # path of keys and list indices -> line, counted from 1
    lines: Mapping[KeyPath, int] = field(repr=False)
    # dotted key -> where its value came from, if not from this file
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def at(self, path: KeyPath) -> str:
        """`file:line: dotted.key` of a path, or of the nearest key around it that exists."""
        dotted = ".".join(map(str, path))
        for key, origin in self.elsewhere.items():
            made_here = key.startswith(f"{dotted}.") and path not in self.lines
            if made_here or dotted == key or dotted.startswith(f"{key}."):
                return f"{origin}{dotted}"
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known, 1)
        return f"{self.name}:{line}" + (f": {dotted}" if dotted else "")

    def locate(self, message: str) -> str:
        """`message`, which begins with a dotted key, with that key's place before it.

        The longest known key is meant: the name of a column may hold points and blanks.
        """
        begun = [path for path in self.lines if message.startswith(".".join(map(str, path)) + ": ")]
        word = message.split(": ")[0]
        path = max(begun, key=len, default=tuple(word.split(".")))
        return self.at(path) + message.removeprefix(".".join(map(str, path)))

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Name the place of the key that an error of this block begins with."""
        try:
            yield
        except ConfigError as e:
            raise type(e)(self.locate(str(e))) from e  # one about a private row stays one

    def line(self, path: KeyPath) -> str:
        """`at` without the key."""
        return self.at(path).split(": ")[0]


def read_yaml(path: str | Path) -> Source:
    """Read one YAML file that holds a mapping.

    Raises:
        ConfigError: If it cannot be read, is not YAML, repeats a key or is not a mapping.
    """
    name = str(path)
    try:
        with Path(path).expanduser().open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        text = raw.decode("utf-8")
    except FileNotFoundError as e:
        raise ConfigError(
            f"{name}: no such file. Check the path, or write one with: dpsweep init"
        ) from e
    except IsADirectoryError as e:
        raise ConfigError(f"{name}: is a folder. Name a YAML file in it") from e
    except (OSError, ValueError, RuntimeError) as e:  # no UTF-8, no such user's home, a NUL inside
        raise ConfigError(f"{name}: cannot be read as text: {e}") from e
    if len(raw) > _MOST_BYTES:
        raise ConfigError(
            f"{name}: has over {_MOST_BYTES} bytes, and a config some thousand. Is it the right "
            f"file?"
        )
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> Source:
    """As `read_yaml`, from text; `name` is what errors call it."""
    lines: dict[KeyPath, int] = {}
    try:
        node = yaml.compose(text, Loader=_Loader)
        _check_size(node, name)
        tree = None if node is None else _construct_value(node, (), lines, name)
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else 1
        raise ConfigError(
            f"{name}:{line}: not valid YAML: {e.problem}. Check the indentation, and that every "
            f"bracket, brace and quote on and above this line is closed"
        ) from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{name}:1: not valid YAML: {e}") from e
    except RecursionError as e:
        raise ConfigError(f"{name}:1: nested too deeply to be a config") from e
    if tree is None:
        raise ConfigError(
            f"{name}:1: is empty. A config holds keys and values, such as name: my-sweep; "
            f"dpsweep init writes one to begin with"
        )
    if not isinstance(tree, dict):
        got = "a list" if isinstance(tree, list) else format_value(tree)
        raise ConfigError(f"{name}:1: expected a mapping of keys to values, got {got}")
    return Source(name, tree, lines)


def dump_yaml(tree: Tree) -> str:
    """A tree as YAML in its own order; mappings and lists that hold no others take one line."""
    return yaml.dump(
        tree,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        width=98,
        allow_unicode=True,  # names of columns are the user's: "Salary €", not "Salary \u20AC"
    )


def format_yaml_value(value: Any) -> str:
    """One value as YAML on one line."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=True,
        width=math.inf,
        allow_unicode=True,
    )
    return text.removesuffix("...\n").strip()  # PyYAML ends a lone scalar's document so


def dump_sweep(file: Source, base: Tree) -> str:
    """A sweep file with its base in it: one file that can be launched again anywhere."""
    return dump_yaml({**file.tree, "base": base})


def with_overrides(
    source: Source, settings: list[str], spell: Callable[[KeyPath], KeyPath] = tuple
) -> Source:
    """`source` with each `dotted.key=value` of `settings` set, the value read as YAML.

    Args:
        settings: As typed after --set.
        spell: Gives the path of keys its proper spelling.
    """
    tree, elsewhere = source.tree, dict(source.elsewhere)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {setting}: expected KEY=VALUE, such as train.batch_size=256")
        value = parse_yaml(f"value: {text}", f"--set {key}").tree["value"]
        path = spell(tuple(key.split(".")))
        try:
            tree = with_value(tree, path, value)
        except ConfigError as e:
            raise ConfigError(f"--set {key}: {e}") from e
        elsewhere[".".join(map(str, path))] = "--set "
    return Source(source.name, tree, source.lines, elsewhere)


def with_value(tree: Tree, path: KeyPath, value: Any) -> Tree:
    """A copy of `tree` with `value` at `path`, mappings made on the way where there are none.

    Raises:
        ConfigError: If the path counts into a list and beyond its end, or leads into a number or
            text.
    """
    head, *rest = path
    inner = value
    if rest:
        below = tree.get(str(head))
        if isinstance(below, list):
            inner = _with_value_in_list(below, path, value)
        else:
            if below is not None and not isinstance(below, dict):
                raise ConfigError(
                    f"{head} is {format_value(below)}, which holds no keys. Write a mapping, such "
                    f"as {head}: {{name: ...}}"
                )
            inner = with_value(below or {}, tuple(rest), value)
    return {**tree, str(head): inner}


def _with_value_in_list(items: list[Any], path: KeyPath, value: Any) -> list[Any]:
    """A copy of `items`, which stand at path[0], with `value` at path[1:]."""
    head, at, *rest = path
    if not str(at).isdigit() or int(at) >= len(items):
        raise ConfigError(
            f"{head} is a list of {len(items)}, counted from 0, and {at!r} is none of them"
        )
    old = items[int(at)]
    tree = old if isinstance(old, dict) else {}
    new = with_value(tree, tuple(rest), value) if rest else value
    return [*items[: int(at)], new, *items[int(at) + 1 :]]


def validate_source(kind: type[Model] | Any, source: Source) -> Model:
    """The config of class `kind` that `source` holds.

    Raises:
        ConfigError: With one line for each mistake.
    """
    try:
        config: Model = TypeAdapter(kind).validate_python(source.tree)
    except ValidationError as e:
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        mistakes: dict[KeyPath, str] = {}
        for place, text in (explain_error(error, model) for error in e.errors()):
            mistakes.setdefault(place, text)  # one for all members of a union
        raise ConfigError(
            "\n".join(f"{source.at(place)}: {text}" for place, text in mistakes.items())
        ) from e
    return config


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: 1e-5 is a number, and yes, no, on and off are words."""


class _Dumper(yaml.SafeDumper):
    """Quotes a word that is a number or a truth value in YAML 1.1 or in 1.2."""


_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_FLOAT = re.compile(
    r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$"
    r"|^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith((":bool", ":float"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _check_size(node: yaml.Node | None, name: str) -> None:
    """Raise ConfigError for a file whose aliases repeat one another without end."""
    waiting, seen = [node], 0
    while waiting:
        seen += 1
        if seen > _MOST_NODES:
            raise ConfigError(
                f"{name}:1: has over {_MOST_NODES} values once its aliases (*name) are written "
                f"out. Give fewer"
            )
        match waiting.pop():
            case yaml.SequenceNode(value=children):
                waiting += children
            case yaml.MappingNode(value=pairs):
                waiting += [child for pair in pairs for child in pair]


def _construct_value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> Any:
    """The Python value of a node, noting the line of every key on the way."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
        raise ConfigError(
            f"{name}:{node.start_mark.line + 1}: {format_value(node.tag)} makes a list or mapping "
            f"something else, and configs hold plain ones. Delete the tag"
        )
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct_value(child, (*path, i), lines, name) for i, child in enumerate(node.value)
        ]
    if isinstance(node, yaml.MappingNode):
        tree: Tree = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key, str):
                raise ConfigError(f"{name}:{line}: a key must be a word, got a list or mapping")
            if key in tree:
                dotted = ".".join(map(str, (*path, key)))
                first = lines[(*path, key)]
                raise ConfigError(
                    f"{name}:{line}: {dotted}: given a second time, first on line {first}. "
                    f"Delete one of the two"
                )
            lines[(*path, key)] = line
            tree[key] = _construct_value(value_node, (*path, key), lines, name)
        return tree
    loader = _Loader("")
    try:
        value = loader.construct_object(node)
    except ValueError as e:
        raise ConfigError(
            f"{name}:{node.start_mark.line + 1}: {format_value(node.value)} cannot be read: {e}"
        ) from e
    finally:
        loader.dispose()
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ConfigError(
            f"{name}:{node.start_mark.line + 1}: {format_value(node.value)} cannot be read: whole "
            f"numbers end at 2^63. Write a number with a point, such as 1e30, where one is wanted"
        )
    return value
