"""Reading a declared data set into memory.

Pixels are scaled to [-1, 1] by constants of the file format, or by constants that the config
declares public. Features, where they are asked for, are a fixed function of each image alone.
Nothing (a mean, a class count) is computed from the training examples, since that would be a
release of its own.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpsweep.core.errors import ConfigError, PrivateRowError
from dpsweep.core.inputs import Inputs, device_of, list_tensors, map_inputs, one_tensor, take_rows
from dpsweep.core.progress import ProgressLines
from dpsweep.core.seeds import derive_public_seed
from dpsweep.core.types import Field, InputSpec
from dpsweep.data import DataConfig, folders, npz
from dpsweep.data.base import Data
from dpsweep.data.datasets import ImageData, Normalise
from dpsweep.data.features import Scattering
from dpsweep.data.own import OwnData
from dpsweep.data.shared import Split, load_shared
from dpsweep.data.tables import FileData
from dpsweep.data.tasks import CLASSIFICATION, Classification, Task
from dpsweep.data.text import GenerationData
from dpsweep.data.units import check_units, group_rows, list_units
from dpsweep.privacy.engine.base import CrossEntropy, Loss

_FEW, _DISTINCT = 30, 0.9
"""Test rows may be training rows by chance where there are few, or many rows are alike."""


def list_class_names(config: DataConfig) -> tuple[str, ...]:
    """Names of the classes in the order of their numbers; the numbers, if nothing names them.

    They are a schema like the number of classes, and public like it.
    """
    if declared := getattr(config.task, "classes", None):
        return tuple(declared)
    place = getattr(config, "place", None)
    if config.name == "folder" and place and place.is_dir():
        return folders.list_folder(place).classes
    return tuple(str(number) for number in range(config.spec.num_classes))


@dataclass(frozen=True)
class Dataset:
    """Both parts in memory: images as bytes, features in half precision, or named tensors."""

    # private; uint8 or float16, shape (N, C, H, W), or tensors named after the model's keyword
    # arguments, shape (N, ...)
    inputs: Inputs
    # private; classes, int64, shape (N,), or what the task takes, shape (N, ...). Of units: targets
    # and weights by name, shape (N, copies, ...); see data/units.py
    targets: Inputs
    valid_inputs: Inputs  # declared public, likewise, shape (M, ...)
    valid_targets: Tensor  # declared public, likewise, shape (M, ...)
    brightest: int  # largest pixel value
    normalise: Normalise | None = None  # public constants to scale pixels by; to [-1, 1] if None
    are_features: bool = False  # True if inputs are no pixels (any more), and are not scaled
    task: Task = CLASSIFICATION  # loss and metrics
    # what the named tensors hold; None if inputs are one tensor
    fields: tuple[Field, ...] | None = None
    copies: int = 1  # rows of a unit; inputs are then of shape (N, copies, ...)
    # tokenizer and lengths, if texts are to be written and measured; else None
    texts: GenerationData | None = None

    @property
    def spec(self) -> InputSpec:
        """Inputs of one example, as a model is given them."""
        if self.fields is not None:
            return self.fields
        return tuple(one_tensor(self.inputs).shape[1 if self.copies == 1 else 2 :])

    def loss(self, outputs_B: Tensor, targets_B: Inputs) -> Tensor:
        """Mean over the examples of each one's own loss; of a unit's rows times their weights."""
        if isinstance(targets_B, dict):
            return (self.task.losses(outputs_B, targets_B["targets"]) * targets_B["weights"]).mean()
        return self.task.loss(outputs_B, targets_B)

    @property
    def engine_loss(self) -> Loss:
        """The same for engines, which compute our own cross-entropy without vmap."""
        plain = type(self.task) is Classification and self.task.class_weights is None
        return CrossEntropy() if plain and isinstance(self.targets, Tensor) else self.loss

    @property
    def device(self) -> torch.device:
        """Device that it lies on."""
        return device_of(self.targets)

    def scaled(self, inputs: Inputs, dtype: torch.dtype) -> Inputs:
        """Pixels in [-1, 1], or (pixel / brightest - mean) / std; shape (..., C, H, W).

        Ids in int64, and features as they are.
        """
        if isinstance(inputs, dict):
            return map_inputs(lambda x: x.to(dtype) if x.is_floating_point() else x.long(), inputs)
        if self.are_features:
            return inputs.to(dtype)
        if self.normalise is None:
            return inputs.to(dtype) * (2 / self.brightest) - 1
        return _normalize(inputs.to(dtype) / self.brightest, self.normalise)

    def to(self, device: torch.device) -> "Dataset":
        """Copy the data set to another device."""
        return replace(
            self,
            inputs=map_inputs(lambda x: x.to(device), self.inputs),
            targets=map_inputs(lambda x: x.to(device), self.targets),
            valid_inputs=map_inputs(lambda x: x.to(device), self.valid_inputs),
            valid_targets=self.valid_targets.to(device),
        )


def download_dataset(config: DataConfig) -> None:
    """Download the files into data.root, as torchvision does.

    Raises:
        ConfigError: If there is no root, or the download fails.
    """
    if not isinstance(config, ImageData) or config.spec.folder is None:
        return
    if config.root is None:
        raise ConfigError("data.root: missing; --download needs a folder to write to")
    from dpsweep.data.files import download_files  # torchvision takes over a second to import

    download_files(config, Path(config.root).expanduser())


@lru_cache(maxsize=2)
def load_dataset(config: DataConfig, seed: int) -> Dataset:
    """Read a data set; the last two stay in memory for the next trial of the same process.

    Args:
        seed: Public seed; says which examples are held out, if any are.

    Raises:
        ConfigError: If the files are missing or are not what torchvision expects.
    """
    train, test = _load_splits(config)
    units = _list_units(config) if isinstance(config, FileData) and config.unit else None
    private: tuple[Inputs, Inputs] = train
    if config.num_held_out:
        rng = torch.Generator().manual_seed(derive_public_seed(seed, "holdout"))
        order = torch.randperm(config.num_rows, generator=rng)
        kept, held = order[config.num_held_out :], order[: config.num_held_out]
        if units is not None:  # whole units, whose rows are then measured one by one
            held = torch.tensor([row for unit in held.tolist() for row in units[unit]])
            units = [units[unit] for unit in kept.tolist()]
        test = take_rows(train[0], held), train[1][held]
        if units is None:
            private = take_rows(train[0], kept), train[1][kept]
    if units is not None:
        private = group_rows(train, units, config.copies)
    return Dataset(
        *private,
        *test,
        brightest=config.spec.brightest,
        normalise=config.normalise,
        are_features=not config.are_pixels,
        fields=config.spec.fields or None,
        task=config.task,
        copies=config.copies,
        texts=config if isinstance(config, GenerationData) and config.task.generates else None,
    )


def refuse_training_rows(config: Data, data: Dataset) -> None:
    """Refuse a test split of which more than half are training examples.

    It is declared public and measured without noise: what is private as well would have no privacy.
    Units have a check of their own, which takes no row of a unit in both.

    Raises:
        PrivateRowError: Naming the key that gives the test split.
    """
    if config.validation != "test_split" or config.copies > 1:
        return
    train, test = _hash_rows(data.inputs), _hash_rows(data.valid_inputs)
    known = set(train)
    if len(test) <= _FEW or len(known) < _DISTINCT * len(train):
        return
    if 2 * sum(row in known for row in test) > len(test):
        keys = [key for key in ("test_file", "test_split") if getattr(config, key, None)]
        key = keys[0] if keys else "function" if isinstance(config, OwnData) else "root"
        raise PrivateRowError(
            f"data.{key}: more than half of the test split are training examples. It is measured "
            f"without noise and declared public, so those would have no privacy. Give other "
            f"examples, or write data.validation: holdout, which takes them out of the training"
        )


def _hash_rows(inputs: Inputs) -> list[int]:
    parts = [x.reshape(len(x), -1).numpy() for x in list_tensors(inputs)]
    return [hash(b"".join(row.tobytes() for row in rows)) for rows in zip(*parts, strict=True)]


def _list_units(config: FileData) -> list[list[int]]:
    found = [
        load_shared(path, partial(config.read_units, key), f"units {key} {config.unit!r}")
        for key, (path, _) in config.files.items()
    ]
    check_units(config, found[0], found[1] if len(found) > 1 else None)
    return list_units(found[0], config.copies)


def fingerprint_images(config: DataConfig, seed: int, key: bytes) -> str:
    """A keyed hash of all images in their order, whatever features are made of them.

    Without the key, whoever knows all private examples but one could test for that one.

    Args:
        key: 32 secret bytes.
    """
    data = load_dataset(config.without_features, seed)
    digest = hashlib.blake2b(
        f"{tuple(list_tensors(data.inputs)[0].shape)}".encode(), key=key, digest_size=32
    )
    valid = (*list_tensors(data.valid_inputs), data.valid_targets)
    for part in (*list_tensors(data.inputs), *list_tensors(data.targets), *valid):
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


def _normalize(pixels: Tensor, by: Normalise) -> Tensor:
    mean, std = (
        torch.tensor(each, dtype=pixels.dtype, device=pixels.device)[:, None, None]
        for each in (by.mean, by.std)
    )
    return (pixels - mean) / std


def load_shared_features(config: DataConfig, seed: int, what: str, make: Callable[[], Any]) -> Any:
    """Load what `make` computes from these examples, from this node's copy if there is one.

    Of each data set the latest few copies stay, and those in use.

    Args:
        seed: Public seed; says which examples are held out, if any are.
        what: Tells apart all that can be made of them.
        make: Returns tensors, in tuples. Called if there is no copy yet.
    """
    key = config.model_dump_json(), seed if config.num_held_out else None, what, config.version
    return load_shared(config.read_from, make, repr(key), series="made")


def _load_splits(config: DataConfig) -> tuple[tuple[Inputs, Tensor], tuple[Inputs, Tensor]]:
    if isinstance(config, ImageData):
        return _load_images(config) if config.features is None else _load_features(config)
    config.refuse_missing()
    if isinstance(config, OwnData):
        train = config.read("train")
        return train, config.read("test") if config.num_test else train
    # one copy for each file and all that decides what is read of it, but for the split
    settings = config.model_dump(exclude={"validation", "holdout_fraction"})
    kind = repr((settings, type(config), config.read_with))
    found: list[Split] = [
        load_shared(path, partial(config.read, key), f"{key} {kind}")
        for key, (path, _) in config.files.items()
    ]
    return found[0], found[-1]


def _check_split(part: Split, expected: int, config: ImageData) -> None:
    """Refuse data of another size than declared.

    Found later, the error would depend on which examples a step samples.
    """
    inputs, targets = part
    if tuple(inputs.shape) != (expected, *config.stored.shape) or len(targets) != expected:
        raise ConfigError(
            f"data.root: {config.root!r} holds {tuple(inputs.shape)} images and {len(targets)} "
            f"labels, and {config.name} has {(expected, *config.stored.shape)}. Copy it afresh"
        )
    outside = targets[(targets < 0) | (targets >= config.spec.num_classes)]
    if len(outside):
        some = ", ".join(str(label) for label in sorted(set(outside.tolist()))[:3])
        raise PrivateRowError(
            f"data.root: {config.root!r} has {len(outside)} labels outside the "
            f"{config.spec.num_classes} classes, which are numbered from 0: {some}. Correct them, "
            f"or data.num_classes"
        )


def _load_images(config: ImageData) -> tuple[Split, Split]:
    """Both splits, as bytes."""
    train, test = _load_digits(config) if config.name == "digits" else _load_files(config)
    for part, expected in ((train, config.spec.num_train), (test, config.spec.num_test)):
        _check_split(part, expected, config)
    return train, test


def _load_features(config: ImageData) -> tuple[Split, Split]:
    """Both splits with features in the place of images; computed by the first process of a node."""
    config.refuse_missing()
    assert config.features is not None
    features = config.features
    versions = [metadata.version(each) for each in features.packages.values()]

    def make() -> tuple[Split, Split]:
        compute = _feature_function(config)
        train, test = _load_images(config)
        lines = ProgressLines(
            f"data.features: {features.name}", len(train[1]) + len(test[1]), "images"
        )
        made = [compute(images, lines.advance) for images, _ in (train, test)]
        return (made[0], train[1]), (made[1], test[1])

    kind = repr((config.stored, config.resize, config.normalise, features, versions))
    found: tuple[Split, Split] = load_shared(config.read_from, make, kind)
    return found


def _feature_function(config: ImageData) -> Callable[[Tensor, Callable[[int], None]], Tensor]:
    """Choose the function that makes features of images as bytes and reports how many are done."""

    def numbers(images: Tensor) -> Tensor:
        pixels = images.to(torch.float32) / config.stored.brightest
        return _normalize(pixels, config.normalise) if config.normalise else pixels

    features = config.features
    if isinstance(features, Scattering):
        from dpsweep.data.scattering import compute_scattering  # kymatio takes a second to import

        brightest = config.stored.brightest
        return partial(compute_scattering, numbers=numbers, config=features, brightest=brightest)
    assert features is not None
    from dpsweep.data.backbone import compute_embedding  # its network is read and folded

    return partial(compute_embedding, numbers=numbers, config=features)


def _load_digits(config: ImageData) -> tuple[Split, Split]:
    def read() -> tuple[Split, Split]:
        from dpsweep.data.digits import load_splits  # scikit-learn takes half a second to import

        return load_splits()

    found: tuple[Split, Split] = load_shared(config.read_from, read)
    return found


def _load_files(config: ImageData) -> tuple[Split, Split]:
    config.refuse_missing()
    assert config.root is not None
    assert config.place is not None
    root, place = Path(config.root).expanduser(), config.place

    def read() -> tuple[Split, Split]:
        if config.name == "npz":
            return npz.read_splits(config, place)
        if config.name in ("folder", "tiny_imagenet"):
            return folders.read_splits(config, place)
        from dpsweep.data.files import read_splits  # torchvision takes over a second to import

        return read_splits(config, root)

    kind = repr((config.stored, config.resize)) if config.stored.folder == "" else ""
    found: tuple[Split, Split] = load_shared(place, read, kind)
    return found
