"""Reference pages, generated from the code while MkDocs builds the site (a hook of mkdocs.yml).

`reference/cli.md` comes from typer's commands, `reference/trial.md` and `reference/sweep.md` from
the pydantic models. Nothing of them is stored: they cannot differ from the code.
"""

import re
from collections.abc import Iterator
from inspect import cleandoc
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dpsweep.cli import app
from dpsweep.config.space.domains import KINDS
from dpsweep.config.sweep import SweepConfig
from dpsweep.config.trial import TrialConfig

BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
WORDS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "mapping",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    for name, page in (("cli", cli()), ("trial", trial()), ("sweep", sweep())):
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let dotted names in tables break after a dot, and nowhere else."""
    return re.sub(
        r"<td><code>dpsweep\.[\w.]+</code>", lambda name: name[0].replace(".", ".<wbr>"), html
    )


def cli() -> str:
    """Every verb with its arguments and options."""
    lines = [
        "# Command line",
        "",
        "Each verb's arguments and options, as `dpsweep VERB --help` prints them. "
        "A user's mistake ends with one message and exit code 2; a fault after which the same "
        "command goes on, with 75.",
    ]
    for name, command in verbs():
        lines += ["", f"## dpsweep {name}", "", text(command.help)]
        shown = [p for p in command.params if not p.hidden]
        if shown:
            lines += ["", "| argument or option | type | default | meaning |", "|---|---|---|---|"]
        for param in shown:
            names = ", ".join(f"`{flag}`" for flag in flags(param))
            row = (names, argument_type(param), argument_default(param), cell(param.help))
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def verbs() -> Iterator[tuple[str, Any]]:
    """Each command of the command line, with its name as it is typed."""
    root: Any = typer.main.get_command(app)
    for name, command in sorted(root.commands.items()):
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {below}", verb) for below, verb in sorted(inner.items()))


def flags(param: Any) -> list[str]:
    """An option's spellings, or an argument's name in capitals."""
    if param.opts[0].startswith("-"):
        return [*param.opts, *param.secondary_opts]
    return [param.metavar or param.name.upper()]


def argument_type(param: Any) -> str:
    """The type of an argument, with its range."""
    annotation = param.type_descriptor.annotation
    if getattr(param, "is_flag", False):
        return "flag"
    repeated = get_args(annotation) if get_origin(annotation) is list else ()
    words = WORDS.get(repeated[0] if repeated else annotation, "path")
    words += f" >= {param.min}" if param.min is not None else ""
    words += f", <= {param.max}" if param.max is not None else ""
    return words + (", repeatable" if repeated else "")


def argument_default(param: Any) -> str:
    """The default of an argument."""
    if param.required:
        return "required"
    return "" if param.default in (None, False, "") else f"`{param.default}`"


def trial() -> str:
    """Every key of a trial config."""
    intro = (
        "# Trial config\n\n"
        "A trial config describes one training run. It is the base of a sweep, what "
        "`dpsweep train` reads, and what `dpsweep export` writes. Unknown keys are errors. "
        "A key with an `or` may also be typed as the letter of the papers. "
        "`dpsweep schema trial` prints the same as a JSON schema for editors.\n"
    )
    return intro + "\n".join(sections(TrialConfig, "", 2)) + "\n"


def sweep() -> str:
    """Every key of a sweep file."""
    intro = (
        "# Sweep file\n\n"
        "A sweep file describes a search around a [trial config](trial.md). Unknown keys are "
        "errors. `dpsweep schema sweep` prints the same as a JSON schema for editors.\n"
    )
    kinds = ", ".join(f"`{kind}`" for kind in KINDS)
    outro = (
        f"\nA searched key takes one of these domains: {kinds}. The guide [Search](../guides/"
        "search.md) shows each of them.\n"
    )
    return intro + "\n".join(sections(SweepConfig, "", 2)) + "\n" + outro


def sections(kind: type[BaseModel], path: str, level: int) -> Iterator[str]:
    """A model's own keys as a table, then a section for each model inside it."""
    yield from table(kind, list(kind.model_fields))
    for name, field in kind.model_fields.items():
        dotted = f"{path}.{name}" if path else name
        members = models_in(field.annotation)
        if not members:
            continue
        yield f"\n{'#' * min(level, 6)} `{dotted}`\n"
        if len(members) == 1:
            yield paragraphs(members[0].__doc__)
            yield from sections(members[0], dotted, level + 1)
        else:
            yield from variants(members, dotted, level + 1)


def variants(members: list[type[BaseModel]], path: str, level: int) -> Iterator[str]:
    """The sections that one key chooses from by `name`: shared keys once, then each one's own."""
    shared = [
        key
        for key, field in members[0].model_fields.items()
        if key != "name"
        and all(
            key in m.model_fields and m.model_fields[key].description == field.description
            for m in members
        )
    ]
    if shared:
        yield "Keys of all of them:"
        yield from table(members[0], shared)
    for member in members:
        yield f"\n{'#' * min(level, 6)} `{path}.name: {member.model_fields['name'].default}`\n"
        yield paragraphs(member.__doc__)
        yield from table(member, [k for k in member.model_fields if k not in (*shared, "name")])
        inner = [k for k in member.model_fields if models_in(member.model_fields[k].annotation)]
        for key in inner:
            if key not in shared:
                yield from nested(member, key, f"{path}.{key}", level + 1)
    for key in shared:
        if models_in(members[0].model_fields[key].annotation):
            yield from nested(members[0], key, f"{path}.{key}", level)


def nested(kind: type[BaseModel], key: str, path: str, level: int) -> Iterator[str]:
    """The sections inside one key of a section."""
    members = models_in(kind.model_fields[key].annotation)
    if len(members) > 1 and all("name" in m.model_fields for m in members):
        yield f"\n{'#' * min(level, 6)} `{path}`\n"
        yield from variants(members, path, level + 1)
        return
    for member in members:
        yield f"\n{'#' * min(level, 6)} `{path}`: {member.__name__}\n"
        yield paragraphs(member.__doc__)
        yield from sections(member, path, level + 1)


def table(kind: type[BaseModel], keys: list[str]) -> Iterator[str]:
    """Some keys of a model as a table."""
    letters = {name: letter for letter, name in getattr(kind, "letters", {}).items()}
    if keys:
        yield "\n| key | type and range | default | meaning |\n|---|---|---|---|"
    for key in keys:
        yield row(key, kind.model_fields[key], letters.get(key, ""))


def row(name: str, field: FieldInfo, letter: str) -> str:
    """One key as a row of a table."""
    shown = " ".join([type_words(field.annotation), *filter(None, map(bound, field.metadata))])
    columns = (
        f"`{name}`" + (f" or `{letter}`" if letter else ""),
        shown,
        "required" if field.is_required() else default_words(field),
        cell(field.description),
    )
    return "| " + " | ".join(columns) + " |"


def bound(marker: object) -> str:
    """A range's end in words, such as > 0."""
    found = [f"{sign} {getattr(marker, m):g}" for m, sign in BOUNDS.items() if hasattr(marker, m)]
    return ", ".join(found)


def type_words(kind: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        marks = [b for m in inner[1:] if (b := bound(m))]
        return " ".join([type_words(inner[0]), *marks])
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in inner)
    if origin in (list, tuple):
        items = dict.fromkeys(type_words(i) for i in inner if i is not ...)
        return "list of " + " and ".join(items)
    if origin is dict:
        return "mapping"
    if inner:  # a union
        named = [i for i in inner if i is not NoneType]
        if models_in(kind):
            return "section"
        return " or ".join(dict.fromkeys(type_words(i) for i in named))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    return WORDS.get(kind, getattr(kind, "__name__", str(kind)))


def models_in(kind: Any) -> list[type[BaseModel]]:
    """The models that a key's type names."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return list(dict.fromkeys(m for inner in get_args(kind) for m in models_in(inner)))


def default_words(field: FieldInfo) -> str:
    """The default of a key."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined or default is None or default in ((), [], ""):
        return ""
    if isinstance(default, BaseModel):
        name = getattr(default, "name", None)
        return f"`{name}`" if name else "see below"
    return f"`{default}`"


def paragraphs(docstring: str | None) -> str:
    """A docstring as Markdown: its paragraphs, without arguments and examples."""
    body = re.split(r"\n\s*(?:Args|Attributes|Returns|Raises):\n|>>> ", docstring or "")[0]
    return cleandoc(body)


def text(docstring: str | None) -> str:
    """A docstring's paragraphs on one line."""
    return " ".join(paragraphs(docstring).split())


def cell(words: str | None) -> str:
    """Text that fits in a table's cell."""
    return text(words).replace("|", "\\|").replace("<", "&lt;")
