"""Data sets in one NumPy file of arrays: images as bytes, labels as whole numbers.

Arrays are called x_train, y_train, x_test, y_test (as Keras has them), or train_images,
train_labels, and val_images, val_labels or test_images, test_labels (as MedMNIST has them).
"""

import ast
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpsweep.core.errors import ConfigError
from dpsweep.data.datasets import DataConfig
from dpsweep.data.shared import Split

_TRAIN = (("x_train", "y_train"), ("train_images", "train_labels"))
_TEST = (("val_images", "val_labels"), ("x_test", "y_test"), ("test_images", "test_labels"))
_WANTED = "x_train, y_train, x_test, y_test, or train_images, train_labels, test_images, ..."


def splits(config: DataConfig, path: Path) -> tuple[Split, Split]:
    """The training split and the test split; that of no examples if it is not asked for.

    Raises:
        ConfigError: If the arrays are not what was declared.
    """
    train = _split(config, path, _TRAIN, "num_train")
    if not config.stored.num_test:
        return train, (train[0][:0], train[1][:0])
    return train, _split(config, path, _TEST, "num_test")


def sizes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each array by name, from the headers alone.

    Raises:
        ConfigError: If it is no such file.
    """
    try:
        with zipfile.ZipFile(path) as whole:
            return {name.removesuffix(".npy"): _header(whole, name) for name in whole.namelist()}
    except (OSError, ValueError, zipfile.BadZipFile, SyntaxError) as e:
        raise ConfigError(f"data.root: {path} is not an .npz file of NumPy's") from e


def names_of(found: dict[str, tuple[int, ...]], *, test: bool) -> tuple[str, str] | None:
    """Names of a split's images and labels among those found."""
    pairs = _TEST if test else _TRAIN
    return next((pair for pair in pairs if all(name in found for name in pair)), None)


def num_classes(path: Path, labels: str) -> int:
    """One more than the largest label: what a user looks up once, and then declares public."""
    with np.load(path, allow_pickle=False) as file:
        return int(file[labels].max()) + 1


def _header(whole: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    with whole.open(name) as array:
        version = np.lib.format.read_magic(array)
        width = 2 if version[0] == 1 else 4
        length = int.from_bytes(array.read(width), "little")
        shape: tuple[int, ...] = ast.literal_eval(array.read(length).decode("latin1"))["shape"]
    return shape


def _split(config: DataConfig, path: Path, pairs: tuple[tuple[str, str], ...], key: str) -> Split:
    found = sizes(path)
    names = names_of(found, test=pairs is _TEST)
    if names is None:
        raise ConfigError(
            f"data.root: {path} holds {', '.join(sorted(found))}, and what is read is {_WANTED}"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = (file[name] for name in names)
    except (OSError, ValueError) as e:
        raise ConfigError(f"data.root: {path} holds no plain arrays: {e}") from e
    return _images(images, names[0], config, key), _labels(labels, names[1], config)


def _images(array: NDArray[np.generic], name: str, config: DataConfig, key: str) -> torch.Tensor:
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
        f"of {name} are {' x '.join(map(str, array.shape[1:]))}"
    )


def _labels(array: NDArray[np.generic], name: str, config: DataConfig) -> torch.Tensor:
    if array.dtype.kind not in "iu" or array.size != len(array):
        raise ConfigError(
            f"data.root: {name} holds {array.dtype} of shape {array.shape}, and labels are one "
            f"whole number an image"
        )
    return torch.from_numpy(array.reshape(-1).astype(np.int64))
