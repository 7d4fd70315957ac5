"""Tables: rows of numbers and categories, with everything about their values declared.

A column is scaled by its declared range, or is one of its declared categories. A mean, a largest
value or a list of categories that is computed from the private rows would be a release of its own,
which no accountant here knows of: so there is none, and an undeclared column is an error that says
what to declare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import ConfigError, InvalidKey, list_some
from dpsweep.core.strict import Strict, is_unused
from dpsweep.data.base import Data, Spec
from dpsweep.data.rows import Column, Format, is_missing, parse_number, read_columns
from dpsweep.data.tasks import Classification, MultiLabel, OwnTask, Regression, TaskConfig

if TYPE_CHECKING:
    from torch import Tensor

Range = Annotated[tuple[float, float], Field(strict=False)]
Values = Annotated[tuple[str | int, ...], Field(strict=False, min_length=2)]


class ColumnConfig(Strict):
    """One input column: a number in a range, or one of some categories. Declared public."""

    range: Range | None = Field(default=None, exclude_if=is_unused)
    """[LOW, HIGH] of a number, which becomes -1 to 1. From public knowledge, such as [0, 120] for
    an age; the smallest and largest of your rows are private."""

    clip: bool = Field(default=False, exclude_if=is_unused)
    """True to bring a number outside the range to its nearest end; otherwise it is an error."""

    categories: Values | None = Field(default=None, exclude_if=is_unused)
    """Values that the column may have; each becomes an input that is 0 or 1."""

    missing: float | str | None = Field(default=None, exclude_if=is_unused)
    """Value to read in the place of an empty cell; otherwise it is an error."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.range is None) == (self.categories is None):
            raise InvalidKey("range", "takes one of range: [LOW, HIGH] and categories: [A, B, ...]")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise InvalidKey("range", f"takes [LOW, HIGH] with LOW below HIGH, got {self.range}")
        if self.categories is not None and len(set(map(str, self.categories))) < len(
            self.categories
        ):
            raise InvalidKey("categories", f"names one twice: {list(self.categories)}")
        return self

    @property
    def num_inputs(self) -> int:
        """Number of inputs that the column becomes."""
        return 1 if self.categories is None else len(self.categories)

    def encode(self, column: Column) -> Tensor:
        """Encode a column, float32, shape (N, num_inputs).

        Raises:
            ConfigError: Naming file, line and value of the first that is not as declared.
        """
        import torch

        if self.categories is None:
            numbers = torch.tensor(column.convert(self._scale), dtype=torch.float32)
            return numbers[:, None]
        places = {str(value): i for i, value in enumerate(self.categories)}

        def encode(value: Any) -> int:
            text = self._present(value)
            text = str(text).strip()
            if text not in places:
                raise ValueError(
                    f"{text!r} is none of the declared categories "
                    f"{list_some([*map(repr, places)])}. Correct it, or add it to "
                    f"data.columns.{column.name}.categories"
                )
            return places[text]

        ids = torch.tensor(column.convert(encode))
        return torch.nn.functional.one_hot(ids, len(places)).float()

    def _present(self, value: Any) -> Any:
        if not is_missing(value):
            return value
        if self.missing is None:
            raise ValueError(
                "is empty or NaN. Correct it, or declare what to read there with missing: VALUE"
            )
        return self.missing

    def _scale(self, value: Any) -> float:
        assert self.range is not None, "categories are encoded elsewhere"
        number, (low, high) = parse_number(self._present(value)), self.range
        if self.clip:
            number = min(max(number, low), high)
        elif not low <= number <= high:
            raise ValueError(
                f"{number:g} is outside the declared range [{low:g}, {high:g}]. Correct it, widen "
                f"the range by public knowledge, or write clip: true"
            )
        return (number - (low + high) / 2) / ((high - low) / 2)


class UnitConfig(Strict):
    """Rows that belong together, such as one person's: all of them are protected together."""

    column: str
    """Column that says whose row it is; rows of one value are one unit."""

    examples_per_unit: int = Field(gt=0)
    """k: rows of a unit that are used, the first ones in the file. Their mean gradient is clipped
    once. Declared, as the largest number of rows of a unit is private."""

    num_units: int = Field(gt=0)
    """N: units of the training file, held-out ones included. Declared, as N is public."""


class RowData(Data):
    """Base of the data sets whose examples are the user's own, with inputs and targets declared."""

    if TYPE_CHECKING:
        num_train: Any
        num_test: Any

    def __hash__(self) -> int:  # some keys hold dicts
        return hash(self.model_dump_json())

    @property
    def input_spec(self) -> dict[str, Any]:
        """Part of `Spec` that describes the inputs."""
        raise NotImplementedError

    def name_targets(self, key: str) -> dict[str, str]:
        """Target columns -> the keys that name them; `key` holds one name or several."""
        given = getattr(self, key)
        if isinstance(given, str):
            return {given: key}
        return {name: f"{key}.{i}" for i, name in enumerate(given)}

    @property
    def num_outputs(self) -> int:
        """K: how many numbers a model gives for an example."""
        match self.task:
            case Classification(classes=None):
                return int(self.num_labels or 0)
            case Classification(classes=tuple(names)):
                return len(names)
            case OwnTask(num_outputs=num):
                return num
        return len(self.targets)

    @property
    def num_labels(self) -> int | None:
        """Number of classes, if it is declared."""
        return getattr(self, "num_classes", None)

    @property
    def targets(self) -> tuple[str, ...]:
        """Columns that are learned."""
        raise NotImplementedError

    @property
    def spec(self) -> Spec:
        """Sizes that a model is built for."""
        return Spec(
            num_train=self.num_train,
            num_test=self.num_test or 0,
            num_classes=self.num_outputs,
            brightest=1,
            folder="",
            **self.input_spec,
        )

    features: ClassVar[None] = None
    normalise: ClassVar[None] = None

    @property
    def num_rows(self) -> int:
        return int(self.num_train)

    def check_split(self, keys: tuple[str, ...]) -> None:
        """Raise InvalidKey if `keys`, which declare the test split, do not fit data.validation."""
        tested = self.validation == "test_split"
        for key in keys:
            if tested and getattr(self, key) is None:
                raise InvalidKey(
                    key,
                    "is missing. Declare the test split, or measure on a part of the training "
                    "split with validation: holdout",
                )
            if not tested and getattr(self, key) is not None:
                raise InvalidKey(key, "is of validation: test_split. Delete one of the two")

    def check_task(self) -> None:
        """Raise InvalidKey if classes and outputs are not declared as the task needs them."""
        if isinstance(self.task, Classification):
            if (self.num_labels is None) == (self.task.classes is None):
                raise InvalidKey(
                    "num_classes",
                    "or task.classes must be declared, and not both: the number of classes, if "
                    "labels are numbers from 0, or their names",
                )
        elif self.num_labels is not None:
            raise InvalidKey("num_classes", "is of classification. Delete it")
        try:
            self.task.check_outputs(self.num_outputs)
        except InvalidKey as e:
            raise InvalidKey(f"task.{e.key}", str(e)) from e

    def encode_targets(self, columns: dict[str, Column]) -> Tensor:
        """Encode the target columns as the task takes them, shape (N,) or (N, K).

        Raises:
            ConfigError: Naming file, line and value of the first that does not fit.
        """
        import torch

        one = self.encode_value()
        found = [torch.tensor(columns[name].convert(one)) for name in self.targets]
        return found[0] if self.has_scalar_targets else torch.stack(found, 1)

    @property
    def has_scalar_targets(self) -> bool:
        """True if targets have shape (N,), and not (N, K)."""
        return isinstance(self.task, Classification) or (
            isinstance(self.task, OwnTask) and len(self.targets) == 1
        )

    def encode_value(self) -> Callable[[Any], float]:
        """Return the function that encodes one value of a target, or raises ValueError."""
        kinds: dict[type, Callable[[Any], float]] = {
            Classification: self._to_class,
            Regression: self._to_number,
            MultiLabel: _to_bit,
            OwnTask: parse_number,
        }
        return kinds[type(self.task)]

    def _to_class(self, value: Any) -> int:
        names = self.task.classes
        if names is not None:
            text = str(value).strip()
            if text not in names:
                raise ValueError(
                    f"{text!r} is none of the {len(names)} classes "
                    f"{list_some([*map(repr, names)])}. Correct it, or data.task.classes"
                )
            return int(names.index(text))
        try:
            number = parse_number(value)
        except ValueError as e:
            if is_missing(value):
                raise
            raise ValueError(
                f"{value!r} is no number, and data.num_classes declares classes that are numbered "
                f"from 0. Correct it, or write data.task: {{name: classification, classes: [A, "
                f"B]}} in its place"
            ) from e
        if not 0 <= number < self.num_outputs or number != int(number):
            raise ValueError(
                f"{value!r} is outside the {self.num_outputs} classes, which are numbered from 0. "
                f"Correct it, or data.num_classes"
            )
        return int(number)

    def _to_number(self, value: Any) -> float:
        number, (low, high) = parse_number(value), self.task.range
        if not low <= number <= high:
            raise ValueError(
                f"{number:g} is outside data.task.range [{low:g}, {high:g}]. Correct it, or widen "
                f"the range by public knowledge"
            )
        return number


class FileData(RowData):
    """Base of the data sets that are read from the rows of files."""

    file: str
    """The training rows: .csv or .tsv with a header, .jsonl, .parquet, or .npz with an array for
    each column. Relative to where you run."""

    test_file: str | None = Field(default=None, exclude_if=is_unused)
    """Rows of the test split, with validation: test_split."""

    format: Format | None = Field(default=None, exclude_if=is_unused)
    """Format of the files, if their names do not end in it. huggingface: `file` is a folder that
    save_to_disk of the package datasets wrote."""

    split: str | None = Field(default=None, exclude_if=is_unused)
    """Training split of format: huggingface, such as train."""

    test_split: str | None = Field(default=None, exclude_if=is_unused)
    """Test split of the same folder, such as validation."""

    num_train: int = Field(gt=0)
    """Training rows, held-out ones included. Declared, as N is public."""

    num_test: int | None = Field(default=None, gt=0, exclude_if=is_unused)
    """Rows of the test split, if there is one."""

    validation: Literal["test_split", "holdout"] = "test_split"
    """Source of the metrics: the test split, which you thereby declare public, or a part of the
    training split, whose rows are then measured without noise and not protected."""

    holdout_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training rows, or of the units, held out; used with validation: holdout only."""

    unit: UnitConfig | None = Field(default=None, exclude_if=is_unused)
    """Protect all rows of a unit together (user-level privacy); each row by itself if missing."""

    @property
    def public_words(self) -> str:
        """Say that the number of rows is public, where units are protected."""
        if self.unit is None:
            return ""
        return (
            f"Declared public too: the number of all units' rows together, {self.num_train:,}. No "
            f"epsilon covers it: who knows all units but one, knows how many rows that one has."
        )

    @property
    def root(self) -> str:
        """The file, as images have a root."""
        return self.file

    @property
    def num_rows(self) -> int:
        return self.num_train if self.unit is None else self.unit.num_units

    @property
    def copies(self) -> int:
        return 1 if self.unit is None else self.unit.examples_per_unit

    @property
    def private_units(self) -> str:
        if self.unit is None:
            return "training examples"
        return f"units (all training rows with one value of {self.unit.column!r})"

    @property
    def protected(self) -> str:
        return "examples" if self.unit is None else "units"

    @property
    def files(self) -> dict[str, tuple[Path, int]]:
        """Key of the number of its rows -> each file, and that number."""
        keys = {"num_train": self.num_train, "num_test": self.num_test or 0}
        paths = [*self.places.values()]
        if self.test_split is not None:
            paths.append(self.place)
        return {key: (path, num) for (key, num), path in zip(keys.items(), paths, strict=False)}

    def read_rows(self, key: str, names: Mapping[str, str]) -> dict[str, Column]:
        """Read columns of the file of num_train or num_test: their names -> keys that name them."""
        path, num = self.files[key]
        tested = key == "num_test"
        file = "test_file" if tested and self.test_file is not None else "file"
        part = "test_split" if tested else "split"
        return read_columns(
            path,
            {name: f"data.{each}" for name, each in names.items()},
            (f"data.{key}", num),
            f"data.{file}",
            self.format,
            (f"data.{part}", getattr(self, part)),
        )

    @property
    def places(self) -> dict[str, Path]:
        found = {"file": self.file, "test_file": self.test_file}
        return {key: Path(file).expanduser() for key, file in found.items() if file is not None}

    @property
    def place(self) -> Path:
        """The file of the training split."""
        return self.places["file"]

    @property
    def read_from(self) -> Path:
        return self.place

    def refuse_missing(self) -> None:
        folder = self.format == "huggingface"
        for key, path in self.places.items():
            if not (path.is_dir() if folder else path.is_file()):
                kind = "folder" if folder else "file"
                raise ConfigError(f"data.{key}: {path} is not a {kind}. Correct the path")
        if folder and find_spec("datasets") is None:
            raise ConfigError(
                "data.format: huggingface is read by the package datasets, which is not "
                "installed here. Add it with: pip install 'dpsweep[datasets]'"
            )

    def read_units(self, key: str) -> Tensor:
        """Read whose row each one is, as hashes, int64, shape (N,)."""
        import torch

        assert self.unit is not None, "asked for where there are units"
        name = self.unit.column
        return torch.tensor(self.read_rows(key, {name: "unit.column"})[name].convert(_hash_unit))

    def check_declared(self) -> None:
        """Raise InvalidKey if what must be declared is missing."""
        if self.unit is not None and self.unit.num_units > self.num_train:
            raise InvalidKey(
                "unit.num_units",
                f"is {self.unit.num_units}, and data.num_train is {self.num_train}: each unit has "
                f"a row at least",
            )
        of_folder = self.format == "huggingface"
        for key in ("split", "test_split"):
            if not of_folder and getattr(self, key) is not None:
                raise InvalidKey(key, "is of format: huggingface. Delete it, or write that format")
        if of_folder and (self.split is None or self.test_file is not None):
            raise InvalidKey("split", "is missing, such as train; test_split names the test split")
        self.check_split(("test_split" if of_folder else "test_file", "num_test"))
        self.check_task()


def _hash_unit(value: Any) -> int:
    if is_missing(value):
        raise ValueError("is empty, and says of no unit whose row it is. Correct it")
    digest = hashlib.blake2b(str(value).strip().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _to_bit(value: Any) -> float:
    number = parse_number(value)
    if number not in (0, 1):
        raise ValueError(f"{value!r} is neither 0 nor 1, as a label must be. Correct it")
    return number


class TableData(FileData):
    """Rows of a table of yours: numbers and categories, each column declared."""

    name: Literal["table"] = "table"

    target: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Column to learn; several with regression and multi_label."""

    columns: dict[str, ColumnConfig] = Field(min_length=1)
    """Input columns, each with its range or its categories; other columns are not read."""

    task: TaskConfig
    """Task: the loss of one example, and the metrics."""

    num_classes: int | None = Field(default=None, gt=1, exclude_if=is_unused)
    """K: number of classes, if labels are numbers from 0."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        self.check_declared()
        if len(self.targets) > 1 and isinstance(self.task, Classification):
            raise InvalidKey("target", "classification takes one column. Use multi_label for more")
        for name in self.targets:
            if name in self.columns:
                raise InvalidKey(f"columns.{name}", "is the target, and no input. Delete it")
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,) if isinstance(self.target, str) else self.target

    @property
    def input_spec(self) -> dict[str, Any]:
        return {"shape": (sum(column.num_inputs for column in self.columns.values()),)}

    def read(self, key: str) -> tuple[Tensor, Tensor]:
        """Read inputs, float32, shape (N, F), and targets of the file of num_train or num_test."""
        import torch

        found = self.read_rows(
            key, {name: f"columns.{name}" for name in self.columns} | self.name_targets("target")
        )
        inputs = [config.encode(found[name]) for name, config in self.columns.items()]
        return torch.cat(inputs, 1), self.encode_targets(found)
