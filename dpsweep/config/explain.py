"""Turns what pydantic found wrong into one sentence: what was expected, what came, what to do."""

import math
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dpsweep.config.keys import BATCH_SIZE, CLIP_NORM, DELTA, EPOCHS, EPSILON, LEARNING_RATE
from dpsweep.core.errors import InvalidKey, normalize_name, suggest_names
from dpsweep.methods import METHODS

Place = tuple[str | int, ...]

_COMPARISONS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_WANTED = {
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    **{"float_type": "a number", "string_type": "text", "bool_type": "true or false"},
    **dict.fromkeys(
        ("model_type", "model_attributes_type", "dict_type"), "a mapping of keys to values"
    ),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
}
_RENAMED_KEYS = {"stop": "pruner", "printed": "published"}
"""Keys, and the value of start, that older files call otherwise."""

_OTHER_NAMES = {
    name: key
    for key, names in {
        LEARNING_RATE: "learning_rate lr",
        CLIP_NORM: "max_grad_norm l2_norm_clip clip clipping_norm clip_norm",
        EPSILON: "target_epsilon eps epsilon",
        DELTA: "target_delta delta",
        BATCH_SIZE: "bs batch_size",
        EPOCHS: "num_epochs n_epochs max_epochs epochs",
        "budget.trials": "n_trials num_trials num_samples trials",
    }.items()
    for name in names.split()
}
"""Name of a key in other libraries, or of a key without its section -> dotted key here."""

_TORCHVISION = re.compile(
    r"(wide_)?res(net|next)\d|vgg\d|densenet\d|efficientnet_|mobilenet_|vit_[bhl]_|convnext_|swin_"
    r"|regnet_|squeezenet|shufflenet|googlenet|inception_v3|alexnet|mnasnet|maxvit"
)
"""Beginnings of the names of torchvision's classifiers."""

_HUGGING_FACE = ("huggingface", "hugging_face", "hf", "datasets", "load_dataset")
"""Names for data sets of the package datasets, which are a format here."""

_SCALARS = ("float", "int", "str")
_QUOTED = ("literal[", "dict[", "list[", "constrained-")
"""Tags pydantic gives the members of a union that are no config class, or how they begin."""


def explain_error(error: Any, model: type[BaseModel] | None) -> tuple[Place, str]:
    """One pydantic error as (path of keys in the file, sentence)."""
    place, owner, field = _locate(error["loc"], model)
    got = format_value(error["input"])
    help_ = describe_field(field)
    match error["type"]:
        case "extra_forbidden":
            return place, _explain_unknown_key(str(place[-1]), owner, model)
        case "missing":
            return place, f"is missing. {help_}"
        case "union_tag_invalid":
            tags = [tag.strip(" '") for tag in error["ctx"]["expected_tags"].split(",")]
            what = place[-1] if place else "name"
            if isinstance(what, int):  # one item of a list, say of filters
                what = str(place[-2]).removesuffix("s")
            tag = error["ctx"]["tag"]
            hint = suggest_names(tag, tags)
            if what == "model" and _TORCHVISION.match(normalize_name(tag)) and tag not in tags:
                rest = hint[hint.index(" Known:") :]
                hint = f" torchvision has it: write {{name: torchvision, model: {tag}}}.{rest}"
            if what == "data" and normalize_name(tag) in _HUGGING_FACE:
                hint = (
                    f" A data set of the package datasets is read from a folder that its "
                    f"save_to_disk wrote: write name: text, table or generation, with format: "
                    f"huggingface, file: FOLDER and split: train (docs/guides/data.md).{hint}"
                )
            if what == "model" and re.search(r"\.py\b|[:/]", tag):
                module = re.sub(r"\.py\b.*", "", tag.rpartition("/")[2]).partition(":")[0]
                hint = (
                    f" For a model of your own write {{name: own, function: {module}:FUNCTION, "
                    f"folder: .}}: docs/guides/models.md.{hint}"
                )
            return (*place, "name"), f"unknown {what} {tag!r}.{hint}"
        case "union_tag_not_found":
            return place, f"needs a name, got {got}. {help_}"
        case "value_error":
            mistake = error["ctx"]["error"]
            inner = mistake.key.split(".") if isinstance(mistake, InvalidKey) else []
            return (*place, *inner), f"{mistake}."
        case "finite_number":
            return place, f"must be a finite number, got {got}. {help_}"
        case "literal_error" if (new := _RENAMED_KEYS.get(str(error["input"]))) and new in str(
            error["ctx"]["expected"]
        ):
            return place, f"{error['input']} is now called {new}. Write {new} in its place"
        case "literal_error":
            known = re.findall(r"'([^']+)'", error["ctx"]["expected"])
            meant = suggest_names(str(error["input"]), known).partition(" Known:")[0]
            return place, f"must be one of {error['ctx']['expected']}, got {got}.{meant} {help_}"
        case "string_pattern_mismatch":
            return place, f"does not have the form it needs, got {got}. {help_}"
        case kind if kind in ("int_type", "float_type") and _is_searchable(error["input"]):
            values = ", ".join(map(str, error["input"]))
            dotted = ".".join(map(str, place))
            return place, (
                f"must be one number, got {got}. To search over these, write under search: in a "
                f"sweep file {dotted}: {{choice: [{values}]}}"
            )
        case kind if kind in _COMPARISONS:
            bound, words = _COMPARISONS[kind]
            return place, f"must be {words} {error['ctx'][bound]}, got {got}. {help_}"
        case "model_type" | "model_attributes_type" | "dict_type" if _may_be_name(error, field):
            return place, (
                f"must be a mapping of keys to values, got {got}. Write {place[-1]}: "
                f"{{name: {error['input']}}}. {help_}"
            )
        case kind if kind in _WANTED:
            return place, f"must be {_WANTED[kind]}, got {got}. {help_}"
    return place, f"{error['msg']}, got {got}. {help_}"


def format_value(value: Any) -> str:
    """A value as the user might have typed it, cut short, with its kind where that matters."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if isinstance(value, str) else str(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"the text {text}" if isinstance(value, str) else text


def _locate(
    loc: Place, model: type[BaseModel] | None
) -> tuple[Place, type[BaseModel] | None, FieldInfo | None]:
    """Path in the file, the innermost model around it, and the field at its end.

    Pydantic puts the tag of a union's member (`method`, `disk`, `kappa`; `delta`, `float`) into
    its own path; the file has no such key.
    """
    place: list[str | int] = []
    field: FieldInfo | None = None
    members: list[type[BaseModel]] = [model] if model else []
    for part in loc:
        if isinstance(part, int):  # one item of a list
            place.append(part)
            continue
        if field and not members and (part in _SCALARS or part.startswith(_QUOTED)):
            continue
        tagged = [m for m in members if len(members) > 1 and part in _get_tags(m)]
        if tagged:
            members = tagged
            continue
        model = members[0] if members else None
        field = model.model_fields.get(str(part)) if model else None
        place.append(part)
        members = list(iter_models(field.annotation)) if field else []
    return tuple(place), model, field


def iter_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The config classes an annotation may stand for."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from iter_models(inner)


def _get_tags(model: type[BaseModel]) -> tuple[Any, ...]:
    """The values of `name` that choose a member of a union: all of its Literal."""
    name = model.model_fields.get("name")
    return get_args(name.annotation) if name else ()


def _may_be_name(error: Any, field: FieldInfo | None) -> bool:
    """True for a word in place of a section that has a `name`."""
    word = isinstance(error["input"], str) and error["input"].isidentifier()
    return word and field is not None and _accepts_any(field, "name")


def _is_searchable(value: Any) -> bool:
    """True for a list of numbers, which is likely meant as a search."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
    )


def _explain_unknown_key(
    key: str, owner: type[BaseModel] | None, root: type[BaseModel] | None
) -> str:
    known = list(owner.model_fields) if owner else []
    owners = [name for name, entry in METHODS.items() if _accepts_key(entry.config, key)]
    mine = next((name for name, entry in METHODS.items() if entry.config is owner), None)
    if mine and owners:
        letters = getattr(METHODS[owners[0]].config, "letters", {})
        printed = [letter for letter, name in letters.items() if name == key]
        also = f" ({printed[0]} in the paper)" if printed else ""
        return (
            f"is a parameter of {', '.join(owners)}{also}, not of {mine}. "
            f"Delete it, or set method.name: {owners[0]}"
        )
    if (new := _RENAMED_KEYS.get(key)) and new in known:
        return f"is now called {new}. Write {new}: in its place"
    letters = getattr(owner, "letters", {})
    return f"unknown key.{suggest_names(key, [*known, *letters], _suggest_key(key, known, root))}"


def _suggest_key(key: str, known: list[str], root: type[BaseModel] | None) -> str | None:
    """The key that goes by this name in Opacus, Optuna or PyTorch, or that stands elsewhere."""
    meant = _OTHER_NAMES.get(normalize_name(key))
    if root is None or meant is None:
        return None
    section, _, name = meant.rpartition(".")
    if name in known:
        return name
    if section == "budget":  # of the sweep file, which --set reaches by that name alone
        return meant
    inside = root.model_fields.get(section)
    return meant if inside and _accepts_any(inside, name) else None


def _accepts_any(field: FieldInfo, key: str) -> bool:
    return any(key in model.model_fields for model in iter_models(field.annotation))


def _accepts_key(config: type[BaseModel], key: str) -> bool:
    return key in config.model_fields or key in getattr(config, "letters", {})


def describe_field(field: FieldInfo | None) -> str:
    """The field's own docstring, its range and its default, as the remedy."""
    if field is None:
        return ""
    parts = [" ".join((field.description or "").split())]
    if span := _format_range(field):
        whole = get_args(field.annotation) or (field.annotation,)
        kind = "a whole number" if int in whole and float not in whole else "a number"
        parts.append(f"Give {kind} in {span}.")
    if not field.is_required() and isinstance(field.default, int | float | str):
        parts.append(f"The default is {field.default}.")
    return " ".join(part for part in parts if part)


def _format_range(field: FieldInfo) -> str:
    """(0, 1] and the like, from the field's constraints; empty if there are none."""
    low, left, high, right = -math.inf, "(", math.inf, ")"
    for rule in field.metadata:
        low, left = (rule.gt, "(") if hasattr(rule, "gt") else (low, left)
        low, left = (rule.ge, "[") if hasattr(rule, "ge") else (low, left)
        high, right = (rule.lt, ")") if hasattr(rule, "lt") else (high, right)
        high, right = (rule.le, "]") if hasattr(rule, "le") else (high, right)
    if math.isinf(low) and math.isinf(high):
        return ""
    return f"{left}{low:g}, {high:g}{right}"
