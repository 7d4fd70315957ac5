"""Image data sets as they are declared: which examples are private, which ones measure.

Reading is data/read.py's.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.strict import Strict, is_unused
from dpsweep.data.base import Data, Spec
from dpsweep.data.features import FeaturesConfig
from dpsweep.data.tasks import CLASSIFICATION, Classification

_DECLARED = ("shape", "num_classes", "num_train")
"""Keys that the user's own data must declare."""

Triple = Annotated[tuple[float, ...], Field(strict=False)]


SPECS = {
    "digits": Spec(1437, 360, (1, 8, 8), 10, 16, None),
    "mnist": Spec(60_000, 10_000, (1, 28, 28), 10, 255, "MNIST/raw"),
    "fashion_mnist": Spec(60_000, 10_000, (1, 28, 28), 10, 255, "FashionMNIST/raw"),
    "kmnist": Spec(60_000, 10_000, (1, 28, 28), 10, 255, "KMNIST/raw"),
    "cifar10": Spec(50_000, 10_000, (3, 32, 32), 10, 255, "cifar-10-batches-py"),
    "cifar100": Spec(50_000, 10_000, (3, 32, 32), 100, 255, "cifar-100-python"),
    "tiny_imagenet": Spec(100_000, 10_000, (3, 64, 64), 200, 255, "tiny-imagenet-200"),
}


class Normalise(Strict):
    """Constants by which pixels are shifted and scaled: (pixel / brightest - mean) / std.

    Whoever writes them declares them public. Those of ImageNet are; a mean over the private
    examples themselves is a release of its own, which nothing here accounts for.
    """

    mean: Triple
    """One number for each channel, in units of the brightest pixel."""

    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False)]
    """One number for each channel, in the same units."""


class ImageData(Data):
    """The private examples, and those that measure the result."""

    name: Literal[
        "digits",
        "mnist",
        "fashion_mnist",
        "kmnist",
        "cifar10",
        "cifar100",
        "tiny_imagenet",
        "folder",
        "npz",
    ]
    """Data set. digits (8x8, from scikit-learn) needs no files. folder: images of your own, one
    folder for each class. npz: a NumPy file of arrays."""

    root: str | None = None
    """Folder in torchvision's layout; needed by all but digits. Relative to where you run. Of
    folder: what holds train/CLASS/IMAGE and val/CLASS/IMAGE (or test), or CLASS/IMAGE with
    validation: holdout. Of npz: the file. `dpsweep data ROOT` prints what to write here."""

    shape: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False)] | None = Field(
        default=None, exclude_if=is_unused
    )
    """[channels, height, width] of each image; 1 or 3 channels. Of folder and npz only."""

    num_classes: int | None = Field(default=None, gt=1, exclude_if=is_unused)
    """K: number of classes, at least 2. Of folder and npz only."""

    num_train: int | None = Field(default=None, gt=0, exclude_if=is_unused)
    """Training images, held-out ones included. Declared, as N is public. Of folder and npz only."""

    num_test: int | None = Field(default=None, gt=0, exclude_if=is_unused)
    """Images of the test split, if there is one. Of folder and npz only."""

    resize: bool = Field(default=False, exclude_if=is_unused)
    """True to scale images of other sizes to cover `shape`, cut them to its middle, and convert
    other colours. Otherwise they are an error. Of folder only."""

    normalise: Normalise | None = Field(default=None, exclude_if=is_unused)
    """Public constants to shift and scale pixels by; if missing they are brought to [-1, 1] by the
    file format's own."""

    features: FeaturesConfig | None = Field(default=None, exclude_if=is_unused)
    """Features to train on instead of pixels: a fixed public function of each image, computed
    once on each node and kept. Pixels if missing."""

    task: Classification = Field(default=CLASSIFICATION, exclude_if=lambda x: x == CLASSIFICATION)
    """Task: the loss of one example, and the metrics."""

    validation: Literal["test_split", "holdout"] = "test_split"
    """Source of accuracies: the test split, which you thereby declare public, or a part of
    the training split, whose examples are then measured without noise and not protected."""

    holdout_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training split held out; used with validation: holdout only."""

    @model_validator(mode="after")
    def _own_data_are_declared(self) -> Self:
        declared = {k: getattr(self, k) for k in (*_DECLARED, "num_test")}
        if self.name in SPECS:
            for key, value in declared.items():
                if value is not None:
                    raise InvalidKey(key, f"is for data of your own, and {self.name} has its own")
        else:
            missing = [key for key in _DECLARED if declared[key] is None]
            if self.validation == "test_split" and self.num_test is None:
                missing.append("num_test")
            if missing:
                raise InvalidKey(
                    missing[0],
                    f"is missing, and {self.name} needs it. What to write is printed by: dpsweep "
                    f"data {self.root or 'ROOT'}",
                )
            assert self.shape is not None
            if len(self.shape) != 3 or self.shape[0] not in (1, 3):
                raise InvalidKey(
                    "shape",
                    f"must be [channels, height, width] with 1 or 3 channels, got "
                    f"{list(self.shape)}",
                )
        if self.resize and self.name != "folder":
            raise InvalidKey(
                "resize", f"is for folder, and the images of {self.name} have one size"
            )
        return self

    @model_validator(mode="after")
    def _normalise_and_features_fit_the_images(self) -> Self:
        channels = self.stored.shape[0]
        for key in ("mean", "std") if self.normalise else ():
            given = len(getattr(self.normalise, key))
            if given != channels:
                raise InvalidKey(
                    f"normalise.{key}",
                    f"has {given} numbers, and the images of {self.name} {channels} channels",
                )
        if self.features is None:
            return self
        if self.normalise is not None and self.features.weights:
            raise InvalidKey(
                "normalise",
                f"{self.features.name} scales pixels by the constants it was trained with. Delete "
                f"normalise",
            )
        try:
            self.features.shape(self.stored.shape)
        except InvalidKey as e:
            raise InvalidKey(f"features.{e.key}", str(e)) from e
        return self

    @property
    def spec(self) -> Spec:
        """Sizes that a model is built for: those of the features, if there are any."""
        if self.features is None:
            return self.stored
        return replace(self.stored, shape=self.features.shape(self.stored.shape))

    @property
    def stored(self) -> Spec:
        """Sizes of the data set's files, before they are read."""
        if self.name in SPECS:
            return SPECS[self.name]
        assert self.shape is not None
        assert self.num_classes is not None
        assert self.num_train is not None
        channels, height, width = self.shape
        return Spec(
            self.num_train, self.num_test or 0, (channels, height, width), self.num_classes, 255, ""
        )

    @property
    def place(self) -> Path | None:
        """Folder or file of the data; None if it needs none, or none is given."""
        if self.root is None or self.spec.folder is None:
            return None
        return Path(self.root).expanduser() / self.spec.folder

    @property
    def places(self) -> dict[str, Path]:
        return {} if self.place is None else {"root": self.place}

    @property
    def read_from(self) -> Path:
        """The folder or file that it is read from; scikit-learn's data if it needs none."""
        if self.place is not None:
            return self.place
        package = find_spec("sklearn")
        assert package is not None, "a dependency of ours"
        assert package.origin is not None, "a package with a file"
        return Path(package.origin).parent / "datasets/data"

    @property
    def without_features(self) -> Data:
        return self.model_copy(update={"features": None})

    @property
    def unit(self) -> None:
        """None: each image is by itself."""

    @property
    def num_rows(self) -> int:
        return self.stored.num_train

    @property
    def public_weights(self) -> str:
        weights = "" if self.features is None else self.features.weights
        return f"{weights} (data.features)" if weights else ""

    @property
    def are_pixels(self) -> bool:
        return self.features is None

    def refuse_missing(self) -> None:
        if self.features is not None:
            self.features.refuse_missing()
        folder = self.spec.folder
        if folder is None:
            return
        place = self.place
        if place is None:
            laid = f"{folder}, as torchvision lays it out" if folder else "the images"
            raise ConfigError(
                f"data.root: missing, and {self.name} needs it. Give the folder that "
                f"holds {laid}, for example with --set data.root=./data"
            )
        if self.name == "npz":
            if not place.is_file():
                raise ConfigError(f"data.root: {place} is not a file. Give the .npz file")
            return
        if not place.is_dir():
            fetched = ", or add --download to fetch it there" if folder else ""
            raise ConfigError(
                f"data.root: {self.root!r} does not hold {self.name}: {place} is not a "
                f"folder. Give another with --set data.root=FOLDER{fetched}"
            )
