"""Models that are not ours: a function of the user's, or one of torchvision's or timm's by name.

Batch norm mixes examples, dropout draws what no seed governs, and in-place layers hide what
engines must see; `make_private` replaces them. Whatever else is wrong with a model is found by
the engine's own checks (privacy/engine/) before the first step.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from dpsweep.core.errors import InvalidKey, format_shape
from dpsweep.core.own_code import import_folder
from dpsweep.data.base import Spec
from dpsweep.models.parts import Model, Shape

if TYPE_CHECKING:
    from torch import nn


class Own(Model):
    """A function of yours, in a module that Python finds. Naming it runs that code."""

    name: Literal["own"] = "own"

    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """MODULE:FUNCTION. It is called with shape (channels, height, width) and num_classes, and the
    `arguments`, and returns an nn.Module: images (B, C, H, W) -> logits (B, num_classes). For
    tables, shape is (columns,); for text, it is called with fields instead of shape, which say
    name, shape and num_ids of each keyword argument of the nn.Module."""

    folder: str | None = None
    """Folder of the module, if it is not installed. Relative to where you run."""

    arguments: dict[str, int | float | bool | str] = Field(default_factory=dict)
    """More arguments, by name."""

    def build_for(self, spec: Spec) -> nn.Module:
        """Build a network: inputs as in `spec` -> outputs, shape (B, *spec.outputs)."""
        import torch
        from torch import nn

        module, _, function = self.function.partition(":")
        given: dict[str, Any] = {"fields": spec.fields} if spec.fields else {"shape": spec.shape}
        with (
            import_folder(self.folder),
            _raise_as_config_error(f"function: {self.function}"),
            torch.device("cpu"),
        ):
            make = getattr(_import_module(module, self.folder), function)
            model = _call(make, {**given, "num_classes": spec.num_classes, **self.arguments})
        if not isinstance(model, nn.Module):
            raise InvalidKey(
                "function", f"{self.function} returned a {type(model).__name__}, not an nn.Module"
            )
        return _check_outputs(model, spec)


def _import_module(name: str, folder: str | None) -> ModuleType:
    """Import the module; name what to write where a file or its folder was meant.

    Raises:
        InvalidKey: If there is none of that name.
    """
    if name.endswith(".py"):
        short = name.removesuffix(".py")
        raise InvalidKey(
            "function",
            f"takes MODULE:FUNCTION, and {name} is a file. Write {short}:FUNCTION, and folder: the "
            f"folder of {name}, such as folder: .",
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name != name:  # another module that this one imports
            raise
        place = "any place that Python knows" if folder is None else folder
        raise InvalidKey(
            "function",
            f"there is no module {name} in {place}. Write folder: the folder of {name}.py, such as "
            f"folder: .",
        ) from e


def _call(make: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call the user's function; say how it is called where it cannot be called so.

    Raises:
        InvalidKey: If it does not take these arguments.
    """
    try:
        inspect.signature(make).bind(**given)
    except TypeError as e:
        arguments = ", ".join(f"{k}={v!r}" for k, v in given.items())
        name = make.__name__
        raise InvalidKey(
            "function",
            f"is called as {name}({arguments}), and {name} does not take that: {e}. Write a "
            f"function that does, such as def make({', '.join(given)}): return {name}(...)",
        ) from e
    except ValueError:  # some callables of C have no signature: they say themselves what is wrong
        pass
    return make(**given)


class _Named(Model):
    """A model of a package, by the name it has there."""

    model: str
    """Its name in the package, such as resnet18."""

    def build_for(self, spec: Spec) -> nn.Module:
        """Build a network: images of `spec` -> logits, shape (B, num_classes)."""
        import torch

        from dpsweep.models.adapt import make_private

        if spec.fields or len(spec.shape) != 3:
            return super().build_for(spec)  # which refuses it
        with _raise_as_config_error(f"model: {self.model}"), torch.device("cpu"):
            model = self._call_function(spec.shape, spec.num_classes)
        return _check_outputs(make_private(model, keep_statistics=bool(self.weights)), spec)

    def _call_function(self, shape: Shape, num_classes: int) -> nn.Module:
        raise NotImplementedError


class Torchvision(_Named):
    """Any classifier of torchvision's, with group norm for batch norm and without dropout."""

    name: Literal["torchvision"] = "torchvision"

    def _call_function(self, shape: Shape, num_classes: int) -> nn.Module:
        models = importlib.import_module("torchvision.models")  # takes over a second
        sized = {"image_size": shape[1]} if self.model.startswith("vit_") else {}
        made: nn.Module = models.get_model(
            self.model, weights=None, num_classes=num_classes, **sized
        )
        return made


class Timm(_Named):
    """Any of timm's, where that package is installed; as Torchvision does it."""

    name: Literal["timm"] = "timm"

    def _call_function(self, shape: Shape, num_classes: int) -> nn.Module:
        if find_spec("timm") is None:
            raise InvalidKey("name", "timm is not installed here. Add it with: pip install timm")
        make = importlib.import_module("timm").create_model
        made: nn.Module = make(
            self.model, pretrained=False, num_classes=num_classes, in_chans=shape[0]
        )
        return made


def _check_outputs(model: nn.Module, spec: Spec) -> nn.Module:
    """`model`, if it takes an example of `spec` and gives a number for each class.

    Raises:
        ValueError: Saying both sizes.
    """
    import torch
    from torch import Tensor, nn

    from dpsweep.core.inputs import apply_model, zero_inputs
    from dpsweep.privacy.engine import refuse_unsupported_layers
    from dpsweep.privacy.engine.state_guard import StateGuard, check_stateless

    given = _describe_inputs(spec)
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is not None and len(spec.shape) == 3 and first.in_channels != spec.shape[0]:
        raise ValueError(
            f"its first convolution takes {first.in_channels} channels, and the data have {given}"
        )
    refuse_unsupported_layers(model)
    like = next(model.parameters(), None)
    if like is None:
        raise ValueError("it has no parameters to train")
    untouched, guard = copy.deepcopy(model), StateGuard(model)
    try:
        with torch.no_grad(), torch.device("cpu"):
            outputs = apply_model(model, zero_inputs(spec.inputs, 1, like))
    except Exception as e:
        raise ValueError(
            f"it does not take {given}, the data's: {type(e).__name__}: {_first_line(e)}"
        ) from e
    if guard.find_change():  # a cache, or an initialisation from data, which is done only once
        with torch.device("cpu"):
            check_stateless(untouched, spec.inputs)
    if not isinstance(outputs, Tensor):
        raise ValueError(f"it returns a {type(outputs).__name__}, not one tensor of logits")
    if outputs.shape != (1, *spec.outputs):
        one = outputs.shape[1:]
        given = f"{format_shape(one)} numbers" if one else "a number without an axis"
        positions = "" if spec.positions is None else f" at each of {spec.positions} positions"
        raise ValueError(
            f"it gives {given} for an example, and the data have {spec.num_classes} "
            f"classes{positions}"
        )
    return model


def _describe_inputs(spec: Spec) -> str:
    if spec.fields:
        fields = (f"{x.name} ({format_shape(x.shape)})" for x in spec.fields)
        return f"tensors by name: {', '.join(fields)}"
    if len(spec.shape) != 3:
        return f"rows of {format_shape(spec.shape)} numbers"
    return f"images of {format_shape(spec.shape)} (channels, height, width)"


@contextmanager
def _raise_as_config_error(what: str) -> Iterator[None]:
    """Raise an error of somebody else's code as a mistake in that key.

    No private example is read while a model is built, so its message can be shown.
    """
    key = what.partition(":")[0]
    try:
        yield
    except InvalidKey:
        raise
    except Exception as e:
        raise InvalidKey(key, f"{what}: {type(e).__name__}: {_first_line(e)}") from e


def _first_line(e: Exception) -> str:
    return next(iter(str(e).strip().splitlines()), "no message")[:300].rstrip(".")


def name_model(model: Any) -> tuple[str, str]:
    """Return the dotted key that names a model's code, and what it says."""
    key = "function" if isinstance(model, Own) else "model" if isinstance(model, _Named) else "name"
    return f"model.{key}", str(getattr(model, key))


def user_code_notice(config: Any) -> str | None:
    """Make the notice that a model is the user's code; None for all others."""
    if not isinstance(config, Own):
        return None
    where = config.folder or "Python's own path"
    return (
        f"model.function: {config.function} (from {where}) is your code. It runs with all your "
        f"rights here and on every worker. Its gradients are clipped and noised like any other's, "
        f"and its modules may keep nothing of the examples. What else it does is not checked"
    )
