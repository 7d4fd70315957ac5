"""A data set of the user's own code: a function that returns a torch Dataset.

Sizes, counts and classes are declared, as for every data set. The code may read anything, so no
file can tell that the examples are still the same: every process reads them itself, nothing is
kept on the node, and trials are bound to a keyed hash of what was read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import ConfigError, InvalidKey, PrivateRowError
from dpsweep.core.own_code import import_function
from dpsweep.core.strict import Strict, is_unused
from dpsweep.core.types import Field as InputField
from dpsweep.data.tables import RowData
from dpsweep.data.tasks import CausalLM, TaskConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dpsweep.core.inputs import Inputs

Sides = Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False, min_length=1)]


class FieldConfig(Strict):
    """One named tensor of an example's inputs."""

    shape: Sides
    """Of one example."""

    num_ids: int | None = Field(default=None, gt=0, exclude_if=is_unused)
    """Its numbers are whole, from 0 to num_ids - 1, as token ids are; floats if missing."""

    mask: bool = Field(default=False, exclude_if=is_unused)
    """True if it is 1 at an example's own positions, which come first, and 0 at padding."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if self.mask and self.num_ids is not None:
            raise InvalidKey("mask", "has no ids. Delete num_ids, or mask")
        return self


class OwnData(RowData):
    """A function of yours that returns a torch Dataset. Naming it runs that code."""

    name: Literal["own"] = "own"

    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """MODULE:FUNCTION. It is called with split="train" or split="test", root=... if you give one,
    and the `arguments`. It returns a torch Dataset, or a list, of pairs (inputs, target). Inputs
    are a tensor of floats, or tensors by name. Each pair must come from its own record alone: what
    you compute from all of them, no epsilon covers."""

    folder: str | None = None
    """Folder of the module, if it is not installed. Relative to where you run."""

    arguments: dict[str, int | float | bool | str] = Field(
        default_factory=dict, exclude_if=is_unused
    )
    """More arguments, by name."""

    root: str | None = Field(default=None, exclude_if=is_unused)
    """Folder or file of the examples; never sent to a cluster."""

    shape: Sides | None = Field(default=None, exclude_if=is_unused)
    """Of the inputs of one example, such as [3, 32, 32] or [20]; or give `fields`."""

    fields: dict[str, FieldConfig] | None = Field(default=None, min_length=1, exclude_if=is_unused)
    """Inputs by the names of the model's keyword arguments, instead of `shape`."""

    task: TaskConfig
    """Task: the loss of one example, and the metrics."""

    num_classes: int | None = Field(default=None, gt=1, exclude_if=is_unused)
    """K: number of classes, if labels are numbers from 0."""

    num_targets: int = Field(default=1, gt=0, exclude_if=lambda x: x == 1)
    """Numbers to learn of each example, with regression and multi_label."""

    num_train: int = Field(gt=0)
    """Training examples, held-out ones included. Declared, as N is public."""

    num_test: int | None = Field(default=None, gt=0, exclude_if=is_unused)
    """Examples of the test split, if there is one."""

    validation: Literal["test_split", "holdout"] = "test_split"
    """Source of the metrics: the test split, which you thereby declare public, or a part of the
    training split, which is then measured without noise and not protected."""

    holdout_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training examples held out; used with validation: holdout only."""

    unit: ClassVar[None] = None
    is_kept: ClassVar[bool] = False

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.shape is None) == (self.fields is None):
            raise InvalidKey("shape", "give one of data.shape and data.fields")
        if isinstance(self.task, CausalLM):
            raise InvalidKey("task.name", "causal_lm is learned from data.name: generation")
        self.check_split(("num_test",))
        self.check_task()
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(f"target {i}" for i in range(self.num_targets))

    @property
    def input_spec(self) -> dict[str, Any]:
        if self.fields is None:
            return {"shape": self.shape}
        named = self.fields.items()
        return {
            "shape": (),
            "fields": tuple(InputField(k, x.shape, x.num_ids, is_mask=x.mask) for k, x in named),
        }

    @property
    def places(self) -> dict[str, Path]:
        return {} if self.root is None else {"root": Path(self.root).expanduser()}

    def refuse_missing(self) -> None:
        for key, path in self.places.items():
            if not path.exists():
                raise ConfigError(f"data.{key}: {path} is not there. Correct the path")
        try:
            import_function(self.function, self.folder)
        except InvalidKey as e:
            raise ConfigError(f"data.{e.key}: {e}") from e

    def read(self, split: Literal["train", "test"]) -> tuple[Inputs, Tensor]:
        """Read inputs and targets of a split, shape (N, ...).

        Raises:
            ConfigError: If the function fails, or returns what is not declared.
        """
        import torch

        key = "num_train" if split == "train" else "num_test"
        num = getattr(self, key)
        given = {"split": split, **({"root": self.root} if self.root else {}), **self.arguments}
        make = import_function(self.function, self.folder)
        found = self._call("", lambda: make(**given))
        size = self._call("", lambda: len(found))
        if size != num:
            raise ConfigError(
                f"data.{key}: declares {num:,}, and data.function: {self.function} has {size:,} "
                f"examples in split {split!r}. Correct one of the two"
            )
        rows: list[dict[str, Tensor]] = []
        targets: list[Tensor] = []
        for index in range(size):
            where = f" of split {split!r}, example {index}"
            rows.append(self._call(where, lambda i=index: self._encode(found[i], targets)))  # type: ignore[misc]
        if self.fields is None:
            return torch.stack([row[""] for row in rows]), torch.stack(targets)
        return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}, torch.stack(targets)

    def _call(self, where: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except ConfigError:
            raise
        except Exception as e:  # the user's own code; it may quote an example
            kind = "" if type(e) is ValueError else f"{type(e).__name__}: "
            raise PrivateRowError(f"data.function: {self.function}{where}: {kind}{e}") from e

    def _encode(self, pair: Any, targets: list[Tensor]) -> dict[str, Tensor]:
        """Encode one example's inputs, and append its target to `targets`."""
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"is a {type(pair).__name__}, and no pair (inputs, target)")
        inputs, target = pair
        if self.fields is None:
            assert self.shape is not None
            encoded = {"": _encode_input(inputs, "inputs", FieldConfig(shape=self.shape))}
        elif not isinstance(inputs, dict) or inputs.keys() != self.fields.keys():
            got = [*inputs] if isinstance(inputs, dict) else type(inputs).__name__
            raise ValueError(f"inputs are {got}, and data.fields declares {[*self.fields]}")
        else:
            encoded = {k: _encode_input(inputs[k], k, x) for k, x in self.fields.items()}
        targets.append(self._encode_target(target))
        return encoded

    def _encode_target(self, target: Any) -> Tensor:
        import torch

        one = self.encode_value()
        values = torch.as_tensor(target).tolist()
        if len(self.targets) == 1 and not isinstance(values, list):
            found = torch.tensor(one(values))
            return found if self.has_scalar_targets else found[None]
        if not isinstance(values, list) or len(values) != len(self.targets):
            raise ValueError(f"target is {values}, and data.num_targets is {self.num_targets}")
        return torch.tensor([one(value) for value in values])


def _encode_input(value: Any, name: str, declared: FieldConfig) -> Tensor:
    """Check one tensor of an example, and keep it in as few bytes as are exact.

    Raises:
        ValueError: Saying what it is instead.
    """
    import torch

    x = torch.as_tensor(value)
    if tuple(x.shape) != declared.shape:
        raise ValueError(f"{name} has the shape {[*x.shape]}, and {[*declared.shape]} is declared")
    if declared.num_ids is None and not declared.mask:
        if not x.is_floating_point():
            raise ValueError(
                f"{name} is {x.dtype}, and floats are declared. Scale it by public constants, such "
                f"as pixel / 127.5 - 1; ids have num_ids"
            )
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name} holds numbers that are not finite. Correct them")
        return x.float()
    least, most = int(x.min()), int(x.max())
    limit = 2 if declared.num_ids is None else declared.num_ids
    if x.is_floating_point() or least < 0 or most >= limit:
        raise ValueError(
            f"{name} is {x.dtype} from {least} to {most}, and whole numbers from 0 to {limit - 1} "
            f"are declared"
        )
    if declared.mask and bool((x.long().diff(dim=-1) > 0).any()):
        raise ValueError(f"{name} has a 1 behind a 0. An example's own positions come first")
    return x.to(torch.uint8 if declared.mask else torch.int32)
