"""A model as the Python code that builds it, for scripts that run without us.

Layers of torch's are written as they print themselves; a block of ours is written as a class with
its own `forward`, and its layers as arguments. What is written is built at once and compared with
the model it came from, so a script never holds another.
"""

import inspect
import sys
import textwrap
from dataclasses import dataclass

import torch
from torch import nn

from dpsweep.config.trial import TrialConfig
from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.errors import ConfigError
from dpsweep.core.own_code import import_folder
from dpsweep.core.weight_standardization import StandardConv2d, standardize_weight
from dpsweep.models import build_model
from dpsweep.models.huggingface import HuggingFace
from dpsweep.models.own import Own, Timm, Torchvision
from dpsweep.models.parts import saved_tensors

_WHOLE = {CirculantLinear: (CirculantLinear,), StandardConv2d: (standardize_weight, StandardConv2d)}
"""Layers of ours that print themselves, and what of our source they are written with."""

_WHOLE_IMPORTS = {
    CirculantLinear: ("from math import gcd, sqrt", "from torch import Tensor"),
    StandardConv2d: ("from math import prod", "from torch import Tensor"),
}
_CONSTANTS = {StandardConv2d: "_EPS = 1e-4"}


@dataclass(frozen=True)
class Code:
    """A model, written out."""

    # lines that its code needs besides `import torch` and `from torch import nn`
    imports: tuple[str, ...]
    definitions: str  # classes and functions of its own; empty if it needs none
    expression: str  # what makes the model


def model_code(config: TrialConfig) -> Code:
    """The model of a trial, without its weights; ConfigError if it cannot be written out."""
    spec = config.data.spec
    if isinstance(config.model, Own):
        code = _call(config.model, spec.shape, spec.num_classes)
        with import_folder(config.model.folder):
            _compare(code, build_model(config.model, spec, config.seed), spec.shape)
        return code
    if isinstance(config.model, HuggingFace):
        raise ConfigError(
            "model.name: huggingface is a model of the package transformers. Export it with "
            "--format huggingface"
        )
    if isinstance(config.model, Torchvision | Timm):
        raise ConfigError(
            f"model.name: {config.model.name} is another package's model with layers replaced by "
            f"us, and that cannot be written out as a script. Export it with --format yaml or "
            f"--register NAME, or make it by a function of your own: model: {{name: own, ...}}"
        )
    model = config.model.build_for(spec)
    writer = _Writer()
    expression = writer.expression(model)
    code = Code(tuple(sorted(writer.imports)), "\n\n\n".join(writer.definitions), expression)
    _compare(code, build_model(config.model, spec, config.seed), spec.shape)
    return code


def _call(model: Own, shape: tuple[int, ...], num_classes: int) -> Code:
    """A call of the user's function; not where it lies, as a script may be given away."""
    module, _, function = model.function.partition(":")
    arguments = {"shape": shape, "num_classes": num_classes, **model.arguments}
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    found = f"# Python must find {module}: put it beside this file\n" if model.folder else ""
    return Code((), f"{found}from {module} import {function}  # noqa", f"{function}({shown})")


class _Writer:
    """Writes one model, and gathers what its code needs."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.definitions: dict[str, None] = {}

    def expression(self, module: nn.Module) -> str:
        """The code that makes `module`."""
        kind = type(module)
        if kind in _WHOLE:
            return self._write_module(module)
        if kind is nn.Sequential:
            return self._call("nn.Sequential", [*map(self.expression, module.children())])
        if kind is nn.MultiheadAttention:
            assert isinstance(module, nn.MultiheadAttention)
            return (
                f"nn.MultiheadAttention({module.embed_dim}, {module.num_heads}, batch_first=True)"
            )
        if kind.__module__.startswith("torch.nn.modules.") and not list(module.children()):
            return f"nn.{module}"
        return self._block(module)

    def _write_module(self, module: nn.Module) -> str:
        kind = type(module)
        self.imports.update(_WHOLE_IMPORTS[kind])
        if kind in _CONSTANTS:
            self.definitions[_CONSTANTS[kind]] = None
        for part in _WHOLE[kind]:
            self.definitions[inspect.getsource(part).rstrip()] = None
        return str(module)

    def _block(self, module: nn.Module) -> str:
        """A module with a forward of its own: its class, and its layers by name."""
        kind = type(module)
        self.imports.add("from torch import Tensor")
        arguments = [
            f"{name}={'None' if part is None else self.expression(part)}"
            for name, part in self._parts(module).items()
        ]
        forward = textwrap.dedent(inspect.getsource(kind.forward)).rstrip()
        lines = [f"class {kind.__name__}(nn.Module):", f'    """{inspect.getdoc(kind)}"""', ""]
        lines += ["    def __init__(self, **layers: nn.Module | None) -> None:"]
        lines += ["        super().__init__()", "        for name, layer in layers.items():"]
        lines += ["            setattr(self, name, layer)", "", textwrap.indent(forward, "    ")]
        self.definitions["\n".join(lines)] = None
        return self._call(kind.__name__, arguments)

    @staticmethod
    def _parts(module: nn.Module) -> dict[str, nn.Module | None]:
        """Its layers, and what could be one and is None in this place."""
        empty = {k: None for k, value in vars(module).items() if value is None and k[0] != "_"}
        return {**dict(module.named_children()), **empty}

    @staticmethod
    def _call(name: str, arguments: list[str]) -> str:
        inner = textwrap.indent(",\n".join(arguments), "    ")
        return f"{name}(\n{inner},\n)" if arguments else f"{name}()"


def _compare(code: Code, model: nn.Module, shape: tuple[int, ...]) -> None:
    """Build what was written, and compare it with the model; ConfigError if the two differ."""
    head = "\n".join(("import torch", "from torch import nn", *code.imports))
    space: dict[str, object] = {"__name__": "written_by_dpsweep"}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        exec(f"{head}\n\n{code.definitions}\n\nmodel = {code.expression}\n", space)
        written = space["model"]
        assert isinstance(written, nn.Module)
        images = torch.randn(2, *shape)
        try:
            written.load_state_dict(saved_tensors(model))
            same = torch.equal(written.eval()(images), model.eval()(images))
        except (RuntimeError, TypeError, NameError):
            same = False
    if not same:
        raise ConfigError(
            f"model: torch {torch.__version__} and Python {sys.version.split()[0]} do not write it "
            f"out as it is. Export it with --format yaml or --register NAME"
        )
