"""Reading a declared data set into memory.

Pixels are scaled to [-1, 1] by constants of the file format, or by constants that the config
declares public. Nothing (a mean, a class count) is computed from the training examples, since that
would be a release of its own.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import public_seed
from dpsweep.data import folders, npz
from dpsweep.data.datasets import DataConfig, Normalise, check_present
from dpsweep.data.shared import Split, shared


@dataclass(frozen=True)
class Dataset:
    """Both parts in memory, as bytes.

    Attributes:
        inputs: Private, uint8, shape (N, C, H, W).
        targets: Private, int64, shape (N,).
        valid_inputs: Declared public, uint8, shape (M, C, H, W).
        valid_targets: Declared public, int64, shape (M,).
        brightest: Largest pixel value.
        normalise: Public constants to scale pixels by; to [-1, 1] if None.
    """

    inputs: Tensor
    targets: Tensor
    valid_inputs: Tensor
    valid_targets: Tensor
    brightest: int
    normalise: Normalise | None = None

    def scaled(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Pixels in [-1, 1], or (pixel / brightest - mean) / std; shape (..., C, H, W)."""
        if self.normalise is None:
            return inputs.to(dtype) * (2 / self.brightest) - 1
        mean, std = (
            torch.tensor(each, dtype=dtype, device=inputs.device)[:, None, None]
            for each in (self.normalise.mean, self.normalise.std)
        )
        return (inputs.to(dtype) / self.brightest - mean) / std

    def to(self, device: torch.device) -> "Dataset":
        """The same on another device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            targets=self.targets.to(device),
            valid_inputs=self.valid_inputs.to(device),
            valid_targets=self.valid_targets.to(device),
        )


def download(config: DataConfig) -> None:
    """Fetches the files into data.root, as torchvision does.

    Raises:
        ConfigError: If there is no root, or the download fails.
    """
    if config.spec.folder is None:
        return
    if config.root is None:
        raise ConfigError("data.root: missing; --download needs a folder to write to")
    from dpsweep.data.files import fetch  # torchvision takes over a second to import

    fetch(config, Path(config.root).expanduser())


@lru_cache(maxsize=2)
def load(config: DataConfig, seed: int) -> Dataset:
    """Reads a data set; the last two stay at hand for the next trial of the same process.

    Args:
        config: The data set.
        seed: Public seed; says which examples are held out, if any are.

    Raises:
        ConfigError: If the files are missing or are not what torchvision expects.
    """
    train, test = _digits() if config.name == "digits" else _from_files(config)
    for part, expected in ((train, config.spec.num_train), (test, config.spec.num_test)):
        _check(part, expected, config)
    if config.num_held_out:
        rng = torch.Generator().manual_seed(public_seed(seed, "holdout"))
        order = torch.randperm(len(train[1]), generator=rng)
        kept, held = order[config.num_held_out :], order[: config.num_held_out]
        test = (train[0][held], train[1][held])
        train = (train[0][kept], train[1][kept])
    return Dataset(*train, *test, brightest=config.spec.brightest, normalise=config.normalise)


def fingerprint(config: DataConfig, seed: int) -> str:
    """A hash of all examples in their order.

    Whoever knows all private examples but one can test for that one: it is as private as they.
    """
    data = load(config, seed)
    told = hashlib.sha256(f"{tuple(data.inputs.shape)}".encode())
    for part in (data.inputs, data.targets, data.valid_inputs, data.valid_targets):
        told.update(part.contiguous().numpy().data)
    return told.hexdigest()


def _check(part: Split, expected: int, config: DataConfig) -> None:
    """Found now, since found later it would depend on which examples a step samples."""
    inputs, targets = part
    if tuple(inputs.shape) != (expected, *config.spec.shape) or len(targets) != expected:
        raise ConfigError(
            f"data.root: {config.root!r} holds {tuple(inputs.shape)} images and {len(targets)} "
            f"labels, and {config.name} has {(expected, *config.spec.shape)}. Copy it afresh"
        )
    outside = targets[(targets < 0) | (targets >= config.spec.num_classes)]
    if len(outside):
        some = ", ".join(str(label) for label in sorted(set(outside.tolist()))[:3])
        raise ConfigError(
            f"data.root: {config.root!r} has {len(outside)} labels outside the "
            f"{config.spec.num_classes} classes, which are numbered from 0: {some}. Correct them, "
            f"or data.num_classes"
        )


def _digits() -> tuple[Split, Split]:
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None

    def read() -> tuple[Split, Split]:
        from dpsweep.data.digits import splits  # scikit-learn takes half a second to import

        return splits()

    found: tuple[Split, Split] = shared(Path(package.origin).parent / "datasets/data", read)
    return found


def _from_files(config: DataConfig) -> tuple[Split, Split]:
    check_present(config, where=config.name)
    assert config.root is not None
    assert config.place is not None
    root, place = Path(config.root).expanduser(), config.place

    def read() -> tuple[Split, Split]:
        if config.name == "npz":
            return npz.splits(config, place)
        if config.name in ("folder", "tiny_imagenet"):
            return folders.splits(config, place)
        from dpsweep.data.files import splits  # torchvision takes over a second to import

        return splits(config, root)

    kind = repr((config.spec, config.resize)) if config.spec.folder == "" else ""
    found: tuple[Split, Split] = shared(place, read, kind)
    return found
