"""The base of every declared data set: its sizes, and which of its examples are private.

It is known before a file is read, so that a budget can be planned and a missing file found without
torch or data.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpsweep.core.cache import source_key
from dpsweep.core.strict import Strict
from dpsweep.core.types import Field, InputSpec


@dataclass(frozen=True)
class Spec:
    """Sizes of a data set, known before it is read."""

    num_train: int  # examples of the training split
    num_test: int  # examples of the test split
    shape: tuple[int, ...]  # (channels, height, width); of one tensor of inputs
    num_classes: int  # K: numbers that a model gives for an example
    brightest: int  # largest pixel value
    # where it lies under the root; "" if the root is all of it, None if it comes with a package
    folder: str | None
    fields: tuple[Field, ...] = ()  # named inputs; none if they are one tensor
    # T, if a model gives K numbers at each position, as a language model does
    positions: int | None = None

    @property
    def outputs(self) -> tuple[int, ...]:
        """Shape of what a model returns for one example: (K,), or (T, K)."""
        return (self.num_classes,) if self.positions is None else (self.positions, self.num_classes)

    @property
    def inputs(self) -> InputSpec:
        """Inputs of one example, as a model is given them."""
        return self.fields or self.shape


class Data(Strict):
    """Base of every data set's config. Fields stand in the classes, in an order of their own."""

    if TYPE_CHECKING:  # fields here would come first in what identifies a trial
        name: Any
        task: Any
        validation: Any
        holdout_fraction: Any

    @property
    def spec(self) -> Spec:
        """Sizes that a model is built for."""
        raise NotImplementedError

    @property
    def num_inputs(self) -> int:
        """F: numbers in an example's tensor of inputs; 1 if its inputs are named."""
        return math.prod(self.spec.shape)

    @property
    def places(self) -> dict[str, Path]:
        """Key -> file or folder of private examples, which are never sent anywhere."""
        raise NotImplementedError

    @property
    def read_from(self) -> Path:
        """The folder or file that it is read from."""
        raise NotImplementedError

    is_kept: ClassVar[bool] = True
    """False if each process reads it anew, as no file tells that it is still the same."""

    @property
    def read_with(self) -> str:
        """Content of other files that decides what is read."""
        return ""

    @property
    def version(self) -> str:
        """Hash of sizes and ages of all its files, and of what else decides what is read."""
        files = [source_key(path, "") for path in self.places.values()]
        return hashlib.sha256(repr((files, self.read_with)).encode()).hexdigest()[:32]

    def refuse_missing(self) -> None:
        """Raise ConfigError if the files are not there, without reading them.

        As those of `load_dataset`, its message begins with the dotted key to correct.
        """
        raise NotImplementedError

    @property
    def without_features(self) -> Data:
        """The same examples as they are read."""
        return self

    @property
    def are_pixels(self) -> bool:
        """True if inputs are images in bytes, which are scaled at each step."""
        return False

    @property
    def num_held_out(self) -> int:
        """Examples of the training split that are measured with and not trained on."""
        if self.validation == "test_split":
            return 0
        return max(1, round(float(self.holdout_fraction) * self.num_rows))

    @property
    def num_examples(self) -> int:
        """N: how many private examples are trained on."""
        return self.num_rows - self.num_held_out

    @property
    def num_rows(self) -> int:
        """Examples of the training split, held-out ones included."""
        raise NotImplementedError

    @property
    def copies(self) -> int:
        """Rows of a private unit whose mean gradient is clipped once; 1 if each is by itself."""
        return 1

    @property
    def private_units(self) -> str:
        """Words for what adding or removing one of is protected."""
        return "training examples"

    @property
    def protected(self) -> str:
        """One word for them: examples or units."""
        return "examples"

    @property
    def public_weights(self) -> str:
        """Weights that its features were made with, in words; empty without."""
        return ""

    @property
    def public_words(self) -> str:
        """Sentence on what else is declared public; empty without."""
        return ""
