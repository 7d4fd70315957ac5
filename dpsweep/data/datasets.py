"""Image data sets as they are declared: which examples are private, which ones measure.

What is written here is known before a file is read, so that a budget can be planned and a
missing folder found without torch or data. Reading is data/read.py's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from dpsweep.core.errors import ConfigError
from dpsweep.core.strict import Strict


@dataclass(frozen=True)
class Spec:
    """What is known of a data set before it is read.

    Attributes:
        num_train: Examples of the training split.
        num_test: Examples of the test split.
        shape: (channels, height, width).
        num_classes: K.
        brightest: Largest pixel value.
        folder: Where torchvision keeps it under the root; None if it comes with a package.
    """

    num_train: int
    num_test: int
    shape: tuple[int, int, int]
    num_classes: int
    brightest: int
    folder: str | None


SPECS = {
    "digits": Spec(1437, 360, (1, 8, 8), 10, 16, None),
    "mnist": Spec(60_000, 10_000, (1, 28, 28), 10, 255, "MNIST/raw"),
    "fashion_mnist": Spec(60_000, 10_000, (1, 28, 28), 10, 255, "FashionMNIST/raw"),
    "cifar10": Spec(50_000, 10_000, (3, 32, 32), 10, 255, "cifar-10-batches-py"),
}


class DataConfig(Strict):
    """Which examples are private, and which ones measure the result."""

    name: Literal["digits", "mnist", "fashion_mnist", "cifar10"]
    """Data set. digits (8x8, from scikit-learn) needs no files."""

    root: str | None = None
    """Folder in torchvision's layout; needed by all but digits. Relative to where you run."""

    validation: Literal["test_split", "holdout"] = "test_split"
    """Where accuracies come from: the test split, which you thereby declare public, or a part of
    the training split, whose examples are then measured without noise and not protected."""

    holdout_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training split held out; used with validation: holdout only."""

    @property
    def spec(self) -> Spec:
        """What is known of the data set before it is read."""
        return SPECS[self.name]

    @property
    def num_held_out(self) -> int:
        """Examples of the training split that are measured with and not trained on."""
        if self.validation == "test_split":
            return 0
        return max(1, round(self.holdout_fraction * self.spec.num_train))

    @property
    def num_examples(self) -> int:
        """N: how many private examples are trained on."""
        return self.spec.num_train - self.num_held_out


def check_present(config: DataConfig, where: str) -> None:
    """Raises ConfigError if the files are not there, without reading them.

    Args:
        config: The data set.
        where: File and line to name, such as "configs/x.yaml:3".
    """
    folder = config.spec.folder
    if folder is None:
        return
    if config.root is None:
        raise ConfigError(
            f"{where}: data.root: missing, and {config.name} needs it. Give the folder that holds "
            f"{folder}, as torchvision lays it out, for example with --set data.root=./data"
        )
    place = Path(config.root).expanduser() / folder
    if not place.is_dir():
        raise ConfigError(
            f"{where}: data.root: {config.root!r} does not hold {config.name}: {place} is not a "
            f"folder. Give another with --set data.root=FOLDER, or add --download to fetch it there"
        )
