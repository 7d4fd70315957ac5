"""Data sets in one NumPy file of arrays: images as bytes, labels as whole numbers.

Arrays are called x_train, y_train, x_test, y_test (as Keras has them), or train_images,
train_labels, and val_images, val_labels or test_images, test_labels (as MedMNIST has them).
"""

import ast
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpsweep.core.errors import ConfigError, format_shape, summarize_error
from dpsweep.data.datasets import ImageData
from dpsweep.data.shared import Split

_TRAIN = (("x_train", "y_train"), ("train_images", "train_labels"))
_TEST = (("val_images", "val_labels"), ("x_test", "y_test"), ("test_images", "test_labels"))
_BROKEN = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)
WANTED = "x_train, y_train, x_test, y_test, or train_images, train_labels, test_images, ..."


def read_splits(config: ImageData, path: Path) -> tuple[Split, Split]:
    """Read the training split and the test split, empty if it is not asked for.

    Raises:
        ConfigError: If the arrays are not what was declared.
    """
    train = _read_split(config, path, _TRAIN, "num_train")
    if not config.stored.num_test:
        return train, (train[0][:0], train[1][:0])
    return train, _read_split(config, path, _TEST, "num_test")


@dataclass(frozen=True)
class Header:
    """Shape and type of an array, from its header."""

    shape: tuple[int, ...]
    dtype: str  # name of its type, such as uint8


def read_headers(path: Path) -> dict[str, Header]:
    """Read the header of each array, by name; the arrays themselves are not read.

    Raises:
        ConfigError: If it is no such file.
    """
    try:
        with zipfile.ZipFile(path) as whole:
            return {
                name.removesuffix(".npy"): _read_header(whole, name) for name in whole.namelist()
            }
    except (*_BROKEN, SyntaxError) as e:
        raise ConfigError(
            f"{path}: is not an .npz file of NumPy's, or is cut short. Copy it afresh, or write it "
            f"with numpy.savez"
        ) from e


def read_arrays(path: Path, names: Sequence[str]) -> list[NDArray[np.generic]]:
    """Read some arrays of a file whose headers can be read.

    Raises:
        ConfigError: If one is broken, or holds Python objects.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return [file[name] for name in names]
    except _BROKEN as e:
        headers = read_headers(path)
        for name in names:
            if headers[name].dtype == "object":
                raise ConfigError(
                    f"{path}: array {name!r} holds Python objects, and reading those may run code. "
                    f"Write it as numbers or text, with .astype(float) or .astype(str)"
                ) from e
        raise ConfigError(
            f"{path}: is broken: {summarize_error(e)}. Copy or write it afresh"
        ) from e


def find_names(found: Mapping[str, Header], *, test: bool) -> tuple[str, str] | None:
    """Find the names of a split's images and labels."""
    pairs = _TEST if test else _TRAIN
    return next((pair for pair in pairs if all(name in found for name in pair)), None)


def read_labels(path: Path, name: str, num_images: int) -> NDArray[np.int64]:
    """Read the labels of a split, shape (num_images,), each at least 0.

    A user looks up the largest once, and then declares the number of classes public.

    Raises:
        ConfigError: If they are not one such number for each image.
    """
    array = _to_integers(read_arrays(path, (name,))[0], name)
    if len(array) != num_images:
        raise ConfigError(f"data.root: {path}: {len(array)} labels in {name}, {num_images} images")
    if int(array.min()) < 0:
        raise ConfigError(
            f"data.root: {path}: {name} holds {int(array.min())}. Number the classes from 0"
        )
    return array


def _read_header(whole: zipfile.ZipFile, name: str) -> Header:
    with whole.open(name) as array:
        version = np.lib.format.read_magic(array)
        width = 2 if version[0] == 1 else 4
        length = int.from_bytes(array.read(width), "little")
        fields = ast.literal_eval(array.read(length).decode("latin1"))
    return Header(fields["shape"], str(np.lib.format.descr_to_dtype(fields["descr"])))


def _read_split(
    config: ImageData, path: Path, pairs: tuple[tuple[str, str], ...], key: str
) -> Split:
    try:
        found = read_headers(path)
        names = find_names(found, test=pairs is _TEST)
        if names is None:
            raise ConfigError(
                f"{path} holds {', '.join(sorted(found))}, and what is read is {WANTED}"
            )
        images, classes = read_arrays(path, names)
    except ConfigError as e:
        raise ConfigError(f"data.root: {e}") from e
    return (
        _to_images(images, names[0], config, key),
        torch.from_numpy(_to_integers(classes, names[1])),
    )


def _to_images(array: NDArray[np.generic], name: str, config: ImageData, key: str) -> torch.Tensor:
    num = getattr(config.stored, key)
    channels, height, width = config.stored.shape
    if array.dtype != np.uint8:
        raise ConfigError(
            f"data.root: {name} holds {array.dtype}, and images are bytes (uint8) from 0 to 255"
        )
    if len(array) != num:
        raise ConfigError(
            f"data.{key}: {num}, and {name} holds {len(array)} images. Write what is there"
        )
    inputs = torch.from_numpy(array)
    match array.shape[1:]:
        case (h, w) if (1, h, w) == (channels, height, width):
            return inputs.unsqueeze(1)
        case (h, w, c) if (c, h, w) == (channels, height, width):
            return inputs.permute(0, 3, 1, 2).contiguous()
        case shape if shape == (channels, height, width):
            return inputs
    raise ConfigError(
        f"data.shape: {channels} x {height} x {width} (channels x height x width), and the images "
        f"of {name} are {format_shape(array.shape[1:])}"
    )


def _to_integers(array: NDArray[np.generic], name: str) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu" or array.size != len(array):
        raise ConfigError(
            f"data.root: {name} holds {array.dtype} of shape {array.shape}, and labels are one "
            f"whole number an image"
        )
    return array.reshape(-1).astype(np.int64)
