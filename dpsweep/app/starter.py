"""The files that `dpsweep init` writes: a commented sweep and its base, or a packaged example.

Ranges and method parameters come from the table of methods, and their comments from the config
classes, so that a file written today follows the schema of today.
"""

import math
import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsweep.config.explain import describe_field, iter_models
from dpsweep.config.keys import (
    BATCH_SIZE,
    CLIP_NORM,
    DELTA,
    EPOCHS,
    EPSILON,
    EVALUATE_EVERY,
    SCOPE,
    TOTAL_STEP,
)
from dpsweep.config.privacy import GOOD_CLIP_NORM
from dpsweep.config.source import Source, Tree, dump_yaml, format_yaml_value, read_yaml
from dpsweep.config.space.defaults import default_space_around
from dpsweep.config.trial import TrialConfig, load_trial
from dpsweep.core.errors import ConfigError, list_some, unknown_name_error
from dpsweep.data import DataConfig, validate_data
from dpsweep.data.inspection import inspect_data, inspect_rows
from dpsweep.data.rows import FORMATS
from dpsweep.data.text import PACKAGED
from dpsweep.methods import METHODS, PUBLISHED
from dpsweep.models.parts import largest_divisor

EXAMPLES = Path(__file__).parents[1] / "examples"
"""sweeps/ and configs/ of the repository: links to them in a checkout, copies in a wheel."""

DIGITS = "digits"
DATA_FORMS = "digits, folder:PATH, npz:PATH, table:FILE or text:FILE"
_OWN = ("folder", "npz", "table", "text")
_ROWS = ("table", "text")

_DECLARED_WORDS = (
    "Paths are relative to where you run dpsweep. Sizes, counts and class names are thereby "
    "declared public; accuracy is measured on the test split, or, with validation: holdout, on a "
    "part of the training split. Neither is protected."
)
_WIDTH = 98
_LARGEST_SIDE = 64
"""Pixels. Larger images of a folder are scaled to it: a search on a laptop is the first aim."""

_SMALLEST_SIDE = 4
"""Pixels, of cnn_small, which halves each side twice."""

_MANY_EXAMPLES = 20_000
_MOST_BANDS = 8
_MOST_CLASSES_LISTED = 20
_SPECTRAL = ("spectral_dp", "block_spectral_dp")
_MOST_BLOCK = 16
_LEAST_FREQUENCIES = 1.5


@dataclass(frozen=True)
class Starter:
    """Files for a user to begin with."""

    sweep: Path  # path of the sweep file
    files: Mapping[Path, str]  # text of each file by its path, the sweep file first
    notes: tuple[str, ...] = ()  # what the user should know of the data, a sentence each


def examples() -> dict[str, str]:
    """First sentence of every packaged sweep by its name, such as quickstart or papers/disk_mnist.

    Raises:
        ConfigError: If this installation carries none.
    """
    root = EXAMPLES / "sweeps"
    found = {path.relative_to(root).with_suffix("").as_posix(): path for path in _sweeps()}
    if not found:
        raise ConfigError(
            f"{root}: holds no examples. The installation is incomplete; install the wheel again"
        )
    return {name: _first_sentence(path) for name, path in found.items()}


def copy_example(example: str, out: Path | None, name: str | None) -> Starter:
    """A packaged sweep, with its base beside it.

    Args:
        example: One of `examples()`.
        out: Path of the sweep file; EXAMPLE.yaml in the current folder if None.
        name: Name of the sweep instead of the example's.

    Raises:
        ConfigError: If there is no such example.
    """
    known = examples()
    if example not in known:
        raise unknown_name_error("example", example, known, where="--from")
    source = EXAMPLES / "sweeps" / f"{example}.yaml"
    text, base = source.read_text(), read_yaml(source).tree["base"]
    default = name or Path(example).name
    sweep = out or Path(f"{default}.yaml")
    files = dict[Path, str]()
    if isinstance(base, str):  # a path relative to sweeps/; the copy has its base beside it
        origin = source.parent / base
        text = re.sub(r"^base: .*$", lambda _: f"base: {origin.name}", text, flags=re.MULTILINE)
        files[sweep.with_name(origin.name)] = origin.read_text()
    if name:
        line = f"name: {format_yaml_value(name)}"  # quoted where it looks like a number
        text = re.sub(r"^name: .*$", lambda _: line, text, flags=re.MULTILINE)
    return Starter(sweep, {sweep: text, **files})


def new_starter(data: str, method: str, out: Path | None, name: str | None) -> Starter:
    """A commented sweep and its base for a data set and a method.

    Args:
        data: digits, folder:PATH, npz:PATH, table:FILE or text:FILE.
        method: A method of the papers.
        out: Path of the sweep file; NAME.yaml in the current folder if None.
        name: Name of the sweep; of the data and the method if None.

    Raises:
        ConfigError: If the data or the method cannot be used.
    """
    if method not in PUBLISHED:
        raise unknown_name_error("method", method, PUBLISHED, where="--method")
    section, found, notes = _data_section(data)
    if section["name"] in _ROWS and method in _SPECTRAL:
        raise ConfigError(
            f"--method {method}: filters convolutions, and models of {section['name']} have none. "
            f"Choose another, such as dp_sgd"
        )
    name = name or _default_name(data, method)
    sweep = out or Path(f"{name}.yaml")
    base = sweep.with_name(f"{sweep.stem}-base.yaml")
    command = f"dpsweep init --data {shlex.quote(data)} --method {method}"
    config = validate_data(section)
    tree = _base_tree(section, method, config)
    files = {
        sweep: _sweep_text(_sweep_tree(name, base.name, tree, config), sweep, method, config),
        base: _base_text(tree, found, command),
    }
    return Starter(sweep, files, notes)


def _data_section(data: str) -> tuple[dict[str, Any], list[str], tuple[str, ...]]:
    """The data section, comment lines on what was found, and notes to print."""
    kind, colon, place = data.partition(":")
    if data == DIGITS:
        comment = "Handwritten digits of scikit-learn: 8 x 8 pixels, 10 classes, no files needed."
        return {"name": "digits"}, [comment], ()
    if kind not in _OWN or not colon:
        if Path(data).expanduser().exists():
            raise ConfigError(f"--data {data}: expected {DATA_FORMS}. {_suggest_forms(data)}")
        forms = (DIGITS, *(f"{own}:PATH" for own in _OWN))
        raise unknown_name_error("data", data, forms, where="--data")
    if not place:
        raise ConfigError(f"--data {data}: names no path. Write --data {kind}:PATH")
    if kind in _ROWS:
        try:
            section, comments = inspect_rows(kind, Path(place))
        except ConfigError as e:
            raise ConfigError(f"--data {data}: {e}") from e
        return section, comments, tuple(comments)
    is_file = place.endswith(".npz") or Path(place).expanduser().is_file()
    if (kind == "folder" and is_file) or (kind == "npz" and not place.endswith(".npz")):
        raise ConfigError(
            f"--data {data}: npz takes a file that ends in .npz, and folder a folder. "
            f"{_suggest_forms(place)}"
        )
    try:
        own_data = inspect_data(Path(place))
    except ConfigError as e:
        raise ConfigError(f"--data {data}: {e}") from e
    section, notes = dict(own_data.section), list[str]()
    channels, *sides = section["shape"]
    if kind == "folder" and max(sides) > _LARGEST_SIDE:
        section |= {"shape": [channels, _LARGEST_SIDE, _LARGEST_SIDE], "resize": True}
        notes.append(
            f"Images are scaled to {_LARGEST_SIDE} x {_LARGEST_SIDE} pixels for a quick start; "
            f"data.shape in the base changes it."
        )
    if min(section["shape"][1:]) < _SMALLEST_SIDE:
        raise ConfigError(
            f"--data {data}: images of {own_data.sizes_found} (channels x height x width) are too "
            f"small for the model: each side must have at least {_SMALLEST_SIDE} pixels"
        )
    if section.get("validation") == "holdout":
        notes.append(
            "There is no test split: a tenth of the training images is held out to measure "
            "accuracy, and is not protected."
        )
    comments = [f"Found in {_printable(place)}: {own_data.sizes_found}, channels x height x width."]
    if own_data.classes:
        listed = list_some([*map(_printable, own_data.classes)], _MOST_CLASSES_LISTED)
        comments.append(f"{len(own_data.classes)} classes, numbered in this order: {listed}.")
    notes.insert(0, " ".join(comments))
    return section, comments, tuple(notes)


def _suggest_forms(place: str) -> str:
    """Say what to write for a path, by what there is."""
    kind = Path(place).suffix.removeprefix(".").lower()
    if Path(place).expanduser().is_dir():
        return f"Write --data folder:{place}"
    if kind not in FORMATS:
        return f"Give a folder, or a file that ends in .{', .'.join(FORMATS)}"
    images = f"--data npz:{place} for images, " if kind == "npz" else ""
    return f"Write {images}--data table:{place} for a table, or --data text:{place} for texts"


def _base_tree(section: Mapping[str, Any], method: str, data: DataConfig) -> Tree:
    """Build the base config, with the step that is the default for it."""
    few = data.num_examples < _MANY_EXAMPLES
    tree: Tree = {
        "data": dict(section),
        "model": _model_section(method, data),
        "privacy": {"epsilon": 4, "scope": "sweep", "delta": "auto", "clip_norm": GOOD_CLIP_NORM},
        "train": {
            "batch_size": batch_size(data.num_examples),
            "epochs": 30 if few else 10,
            "evaluate_every": 3 if few else 1,
        },
        "optimizer": {"schedule": {"name": "cosine"}},
        "method": _method_section(method, data.num_examples // batch_size(data.num_examples)),
        "seed": 0,
    }
    step = load_trial(Source("init", tree, {})).default_total_step
    return {**tree, "optimizer": {"total_step": step, **tree["optimizer"]}}


def _base_text(tree: Tree, found: list[str], command: str) -> str:
    method, data = tree["method"]["name"], validate_data(tree["data"])
    comments = {
        "data": _DECLARED_WORDS * (tree["data"]["name"] in _OWN),
        "model": "What is trained. `dpsweep models` lists the others. "
        + "width: channels of the first convolution, at least 1. " * (data.name not in _ROWS)
        + "Every weight gets noise, so a larger model may do worse.",
        EPSILON: "Privacy budget, from 0.01 to 1000; smaller is more private and less "
        "accurate. Neighbouring data sets differ by one example.",
        SCOPE: "What epsilon covers. sweep: all trials and the final run together. "
        "trial: each trial by itself; `dpsweep train` takes this file with --set "
        "privacy.scope=trial.",
        DELTA: "Chance that the epsilon bound fails, between 0 and 1, well below 1 / "
        "(number of examples). auto is (number of examples)^-1.1.",
        CLIP_NORM: "Largest L2 norm of one example's gradient, above 0; longer gradients "
        "are scaled down to it. The noise is proportional to it. The sweep varies it.",
        BATCH_SIZE: f"Expected number of examples in a batch, from 1 to {data.num_examples}.",
        EPOCHS: "Passes over the training data, above 0. More passes need more noise for "
        "the same epsilon.",
        EVALUATE_EVERY: "Epochs between two measurements of accuracy, a whole number from 1.",
        TOTAL_STEP: "How far the weights travel in the whole run if all clipped "
        "gradients point the same way, above 0; the learning rate follows from it. This is the "
        "default for these data, this model and this epsilon. The sweep varies it.",
        "optimizer.schedule": "Learning rate over the run: cosine (down to 0) or constant.",
        "method": f"The training method ({METHODS[method].paper}), one of {', '.join(PUBLISHED)}. "
        f"The ranges of a method: dpsweep space METHOD.",
        "seed": "Public seed of the first weights and the held-out split, a whole number from 0. "
        "Noise and batches are drawn from a secret instead.",
    }
    head = [
        "# The base of a sweep: one training run with differential privacy.",
        f"# Written by: {_printable(command)}",
        "",
        *(line for comment in found for line in _comment(comment)),
    ]
    return "\n".join([*head, *_commented_sections(tree, comments)])


def _sweep_tree(name: str, base: str, tree: Tree, data: DataConfig) -> Tree:
    share = 0.1 if data.num_examples < _MANY_EXAMPLES else 0.05
    return {
        "name": name,
        "base": base,
        "search": _space(data, tree),
        "objective": {"metric": "valid/accuracy"},
        "budget": {"explore": {"trials": 8, "share": share}},
        "resources": {"cpu": 1},
    }


def _sweep_text(tree: Tree, sweep: Path, method: str, data: DataConfig) -> str:
    typed = _printable(shlex.quote(str(sweep)))
    comments = {f"search.{key}": _comment_of(key, method) for key in tree["search"]} | {
        "name": "Name of the sweep in `dpsweep status`, `resume`, `best` and `export`.",
        "base": "The config that is varied: data, model, privacy, epochs. The path is relative to "
        "this file.",
        "search": "What varies. Ways to vary a key of the base: uniform: [LOW, HIGH], log_uniform: "
        "[LOW, HIGH] (even on a log scale), integer: [LOW, HIGH], choice: [A, B, C]. A value that "
        "all trials share belongs in the base instead. Batch size and epochs can vary too, with a "
        "looser proof.",
        "objective": "What a trial is judged by: valid/accuracy (0 to 1, higher is better) or "
        "valid/loss (lower is better).",
        "budget.explore": "How epsilon is spent: noisy trials choose a config with a small share "
        "of it, and one final run at that config has the rest. Its model is exported. Exploring "
        "trials come to low accuracies; that is meant. To give every trial the whole epsilon, and "
        "pay for all of them: budget: {trials: 16} here, and scope: trial in the base.",
        "resources": "CPU cores of one trial, at least 1. `gpu: 0.25` gives it a quarter of a GPU.",
    }
    head = [
        f"# A sweep: {method} on {data.name}.",
        "# It looks for the best model for one epsilon, the search included.",
        f"#   dpsweep check  {typed}    is the file valid, are the data there",
        f"#   dpsweep plan   {typed}    noise, epsilon of a trial and of the search, time",
        f"#   dpsweep launch {typed}    run it",
        "",
    ]
    return "\n".join([*head, *_commented_sections(tree, comments)])


def _commented_sections(tree: Tree, comments: Mapping[str, str]) -> list[str]:
    """Each section under its comment, or with a comment over each of its keys; an empty line last.

    Args:
        comments: By dotted key: of a section, of the keys in one, or of both.
    """
    lines = []
    for section, value in tree.items():
        own = {k: v for k, v in comments.items() if k.startswith(f"{section}.")}
        if not own:
            lines += [*_format_commented(comments[section], {section: value}), ""]
            continue
        lines += [*_comment(comments.get(section, "")), f"{section}:"]
        for key, each in value.items():
            lines += _format_commented(own[f"{section}.{key}"], {key: each}, indent=2)
        lines.append("")
    return lines


def batch_size(num_examples: int) -> int:
    """A batch size to begin with: a power of two, a quarter of the data at most.

    >>> batch_size(1437), batch_size(60_000), batch_size(1)
    (256, 2048, 1)
    """
    return int(2 ** int(math.log2(min(2048, max(1, num_examples // 4)))))


def _method_section(method: str, most_bands: int) -> dict[str, Any]:
    """The method; with a number of bands, as `auto` needs a trial's own epsilon."""
    if "bands" not in METHODS[method].config.model_fields:
        return {"name": method}
    return {"name": method, "bands": int(2 ** int(math.log2(min(_MOST_BANDS, most_bands))))}


def _model_section(method: str, data: DataConfig) -> dict[str, Any]:
    """A small CNN, with a circulant head for the methods that filter one; linear for rows."""
    if data.name == "text":
        return {"name": "huggingface", "package": PACKAGED, "adapter": {"name": "head"}}
    if data.name == "table":
        return {"name": "linear"}
    if method not in _SPECTRAL:
        return {"name": "cnn_small", "width": 16}
    num_classes = data.spec.num_classes
    block = largest_divisor(min(_MOST_BLOCK, num_classes), num_classes)
    block = num_classes if block == 1 else block  # a prime number of classes
    return {"name": "cnn_small", "width": block * math.ceil(16 / block), "block": block}


def _space(data: DataConfig, tree: Tree) -> dict[str, Any]:
    """The default space around a base config, without what too few frequencies make impossible.

    A spectral method needs more than the constant, the first frequency of each axis. There are as
    many as the circulant block is large, and as half an image side in the second convolution.
    """
    method = tree["method"]["name"]
    sweep = Source("init", {"search": {}}, {})
    space = default_space_around(method, sweep, Source("init", tree, {}))
    if method not in _SPECTRAL:
        return space
    block = tree["model"]["block"]
    side = min(data.spec.shape[1:]) // 2
    fewest = {"method.keep": side, "method.keep_circulant": block}
    if "method.keep_circulant" not in space:
        fewest["method.keep"] = min(side, block)
    for key, count in fewest.items():
        if key in space:
            low, high = space[key]["uniform"]
            space[key] = {
                "uniform": [max(low, math.ceil(1e4 * _LEAST_FREQUENCIES / count) / 1e4), high]
            }
    return space


def _comment_of(key: str, method: str) -> str:
    """Get the config class's description of a searched key, with its range."""
    if key == TOTAL_STEP:
        return "Total step, above 0: how far the weights travel at most."
    section, _, name = key.partition(".")
    if section == "method":
        return describe_field(METHODS[method].config.model_fields[name])
    wanted = METHODS[method].bases[0]
    for model in iter_models(TrialConfig.model_fields[section].annotation):
        if section != "optimizer" or model.model_fields["name"].default == wanted:
            return describe_field(model.model_fields[name])
    raise AssertionError(f"{key} of {method} is no key of a trial")


def _format_commented(comment: str, tree: Mapping[str, Any], indent: int = 0) -> list[str]:
    """A tree as YAML lines under its comment."""
    space = " " * indent
    body = [
        dump_yaml({key: value}).rstrip("\n")
        if isinstance(value, dict) and not indent
        else f"{space}{key}: {format_yaml_value(value)}"
        for key, value in tree.items()
    ]
    return [*_comment(comment, indent), *body]


def _comment(text: str, indent: int = 0) -> list[str]:
    prefix = " " * indent + "# "
    # A range such as (0, 1] is not broken; textwrap breaks at ASCII blanks alone.
    text = re.sub(r"([\[(][^\s,]+), ([^\s,]+[\])])", "\\1,\N{NO-BREAK SPACE}\\2", text)
    lines = textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _default_name(data: str, method: str) -> str:
    kind, _, place = data.partition(":")
    words = f"{Path(place).stem or kind}-{method}".replace("_", "-")
    return re.sub(r"[^A-Za-z0-9.-]+", "-", words).lstrip(".-")[-80:].lstrip(".-")


def _printable(text: str) -> str:
    """`text` as it may stand in a comment: a line break in a file's name would end it."""
    return text if text.isprintable() else ascii(text)


def _sweeps() -> list[Path]:
    root = EXAMPLES / "sweeps"
    return sorted(root.rglob("*.yaml"), key=lambda p: (len(p.relative_to(root).parts), p))


def _first_sentence(path: Path) -> str:
    """The comment that opens a file, up to its first full stop."""
    lines = list[str]()
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return re.split(r"(?<=[.?])\s", " ".join(lines), maxsplit=1)[0]
