"""Image data sets in torchvision's files. Importing this costs over a second: torchvision."""

from pathlib import Path

import torch
from torchvision import datasets as tv

from dpsweep.core.errors import ConfigError
from dpsweep.data.datasets import ImageData
from dpsweep.data.shared import Split

_READERS = {
    "mnist": tv.MNIST,
    "fashion_mnist": tv.FashionMNIST,
    "kmnist": tv.KMNIST,
    "cifar10": tv.CIFAR10,
    "cifar100": tv.CIFAR100,
}


def download_files(config: ImageData, root: Path) -> None:
    """Download the files, as torchvision does.

    Raises:
        ConfigError: If torchvision knows nothing of them, or the download fails.
    """
    if config.name not in _READERS:
        raise ConfigError(
            f"data.name: {config.name} is not fetched by --download. Put its files into "
            f"{config.root!r} yourself"
        )
    try:
        _READERS[config.name](root, train=True, download=True)
    except (OSError, RuntimeError) as e:
        raise ConfigError(
            f"data.root: could not download {config.name} to {config.root!r}: {e}. Check the "
            f"connection, or copy the files there in torchvision's layout ({config.spec.folder})"
        ) from e


def read_splits(config: ImageData, root: Path) -> tuple[Split, Split]:
    """Read the training split and the test split.

    Raises:
        ConfigError: If torchvision cannot read the files.
    """
    try:
        train, test = (_READERS[config.name](root, train=train) for train in (True, False))
    except (OSError, RuntimeError, ValueError) as e:
        raise ConfigError(
            f"data.root: {config.root!r} holds {config.name} but torchvision cannot read it: {e} "
            f"Copy it afresh, or add --download"
        ) from e
    return _to_tensors(train), _to_tensors(test)


def _to_tensors(part: tv.VisionDataset) -> Split:
    inputs = torch.as_tensor(part.data)
    channels_first = inputs.unsqueeze(1) if inputs.dim() == 3 else inputs.permute(0, 3, 1, 2)
    return channels_first.contiguous(), torch.as_tensor(part.targets).to(torch.int64)
