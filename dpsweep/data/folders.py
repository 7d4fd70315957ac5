"""Images in folders, one for each class.

    ROOT/train/CLASS/**/IMAGE     training split
    ROOT/val/CLASS/**/IMAGE       test split; or valid, validation, test: the first that is there
    ROOT/CLASS/**/IMAGE           training split alone, if ROOT holds no train

Classes are numbered in the order of their names. A test split may instead list its images in
val_annotations.txt, as Tiny ImageNet does (name, tab, class).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dpsweep.core.errors import ConfigError, PrivateRowError, format_shape, list_some
from dpsweep.data.datasets import ImageData
from dpsweep.data.shared import Split

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_TESTS = ("val", "valid", "validation", "test")
_ANNOTATIONS = "val_annotations.txt"
_SHOWN = 3
_MODES = {1: "L", 3: "RGB"}
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)

Labelled = tuple[Path, int]
"""An image and the number of its class."""


@dataclass(frozen=True)
class Listing:
    """Content of a folder of images, by file names alone."""

    classes: tuple[str, ...]  # their names, in order
    train: tuple[Labelled, ...]  # the training split
    test: tuple[Labelled, ...]  # the test split; empty if there is none


def list_folder(root: Path) -> Listing:
    """List the images in `root` by class; no image is opened.

    Raises:
        ConfigError: If there are fewer than two classes, or the test split has others.
    """
    apart = root / "train"
    folder = apart if apart.is_dir() else root
    classes = tuple(sorted(p.name for p in folder.iterdir() if p.is_dir() and _is_visible(p)))
    if len(classes) < 2:
        found = f"one class, {classes[0]!r}" if classes else "no folders"
        raise ConfigError(
            f"data.root: {folder} holds {found}. Each class is a folder: put the images of each "
            f"class into a folder of its own, and have at least two"
        )
    test = next((root / n for n in _TESTS if (root / n).is_dir()), None) if apart.is_dir() else None
    train = tuple(pair for i, name in enumerate(classes) for pair in _list_images(folder / name, i))
    return Listing(classes, train, () if test is None else tuple(_list_test_images(test, classes)))


def read_splits(config: ImageData, root: Path) -> tuple[Split, Split]:
    """Read the training split and the test split, empty if it is not asked for.

    Raises:
        ConfigError: If the folder is not what was declared, or images cannot be read or have other
            sizes.
    """
    listing, spec = list_folder(root), config.stored
    if len(listing.classes) != spec.num_classes:
        raise ConfigError(
            f"data.num_classes: {spec.num_classes}, and {root} holds {len(listing.classes)} classes"
        )
    test = listing.test if spec.num_test else ()
    counts = {"num_train": (spec.num_train, listing.train), "num_test": (spec.num_test, test)}
    for key, (declared, found) in counts.items():
        if declared != len(found):
            raise ConfigError(
                f"data.{key}: {declared}, and {root} holds {len(found)} such images. Write what is "
                f"there; dpsweep data {root} prints it"
            )
    return _read_images(listing.train, config), _read_images(test, config)


def image_shape(image: Path) -> tuple[int, ...]:
    """Read (channels, height, width) of an image; its colours count as 1 or 3 channels.

    Raises:
        ConfigError: If the file cannot be read as an image.
    """
    try:
        with Image.open(image) as opened:
            return _read_image_shape(opened)
    except _UNREADABLE as e:
        raise ConfigError(f"{image}: cannot be read as an image") from e


def _list_test_images(folder: Path, classes: Sequence[str]) -> list[Labelled]:
    number = {name: i for i, name in enumerate(classes)}
    table = folder / _ANNOTATIONS
    if table.exists():
        lines = [line.split("\t")[:2] for line in table.read_text().splitlines() if line]
        named = [(folder / "images" / image, name) for image, name in lines]
    else:
        inside = sorted(p for p in folder.iterdir() if p.is_dir() and _is_visible(p))
        named = [(image, place.name) for place in inside for image, _ in _list_images(place, 0)]
    others = sorted({name for _, name in named} - number.keys())
    if others:
        shown = ", ".join(map(repr, others[:_SHOWN]))
        raise ConfigError(
            f"data.root: {folder} has labels outside the classes of the training split: "
            f"{len(others)} of them, such as {shown}"
        )
    return [(image, number[name]) for image, name in named]


def _list_images(folder: Path, label: int) -> list[Labelled]:
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and _is_visible(p))
    return [(p, label) for p in found]


def _is_visible(path: Path) -> bool:
    return not path.name.startswith(".")


def _read_images(images: Sequence[Labelled], config: ImageData) -> Split:
    inputs = torch.empty(len(images), *config.stored.shape, dtype=torch.uint8)
    broken: list[Path] = []
    other: list[str] = []

    def read(i: int) -> None:
        path = images[i][0]
        try:
            with Image.open(path) as opened:
                opened.load()
                shape = _read_image_shape(opened)
                if config.resize or _is_convertible(shape, config.stored.shape):
                    inputs[i] = _read_pixels(opened, config.stored.shape)
                else:
                    other.append(f"{path} ({format_shape(shape)})")
        except _UNREADABLE:
            broken.append(path)

    with ThreadPoolExecutor() as pool:
        list(pool.map(read, range(len(images))))
    if broken:
        raise PrivateRowError(
            f"data.root: {len(broken)} of {len(images)} images cannot be read: "
            f"{list_some(sorted(map(str, broken)))}. Mend or delete them, and correct "
            f"data.num_train and data.num_test"
        )
    if other:
        raise PrivateRowError(
            f"data.shape: {format_shape(config.stored.shape)} (channels x height x width), and "
            f"{len(other)} of {len(images)} images have another: {list_some(sorted(other))}. "
            f"Correct it, or set data.resize: true"
        )
    return inputs, torch.tensor([label for _, label in images], dtype=torch.int64)


def _read_image_shape(image: Image.Image) -> tuple[int, ...]:
    grey = image.mode in ("1", "L", "LA", "I", "I;16", "F")
    return 1 if grey else 3, image.height, image.width


def _is_convertible(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """True if nothing is lost: a grey image among coloured ones has three equal channels."""
    return shape[1:] == wanted[1:] and shape[0] <= wanted[0]


def _read_pixels(image: Image.Image, shape: tuple[int, ...]) -> Tensor:
    channels, height, width = shape
    plain = image.convert(_MODES[channels])
    if (plain.height, plain.width) != (height, width):
        plain = ImageOps.fit(plain, (width, height), Image.Resampling.BILINEAR)
    array = torch.from_numpy(np.array(plain))
    return array.view(height, width, channels).permute(2, 0, 1)
