"""The space in which gradients are clipped and noised: the parameters' own, or a spectral one.

    r = (1/B) L+( sum_i clip_C(L a_i)  +  sigma C z )

L is a fixed linear map per layer with sensitivity kept: the engine sums clipped gradients in
whitened coordinates (see privacy/spectral.py), the noise is isotropic there, and `restore` leads
back to gradients. Where nothing is said L is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dpsweep.core.errors import InvalidKey
from dpsweep.core.types import InputSpec, Released

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from dpsweep.core.circulant import CirculantLinear
    from dpsweep.privacy.spectral import LayerMap


@dataclass(frozen=True)
class Spectral:
    """Spectral-DP: a convolution's gradient is all lags of a correlation, low-passed.

    Attributes:
        keep: Share of the frequencies kept per axis of a convolution, in (0, 1].
        keep_circulant: The same for the blocks of a CirculantLinear.
    """

    keep: float
    keep_circulant: float


@dataclass(frozen=True)
class Geometry:
    """The map of each parameter that has one.

    Attributes:
        maps: Parameter name -> its layer's map.
    """

    maps: Mapping[str, LayerMap] = field(default_factory=dict)

    def restore(self, released: Released) -> Released:
        """White coordinates -> gradients, shape (*param.shape). Post-processing."""
        return Released(
            {k: self.maps[k].restore(x) if k in self.maps else x for k, x in released.items()}
        )

    def to(self, device: torch.device) -> Geometry:
        """Copy the geometry with its constants to `device`."""
        return Geometry({k: one.to(device) for k, one in self.maps.items()})

    def noise_gain(self, name: str) -> float:
        """Variance of one entry of a restored gradient per unit variance of white noise."""
        return self.maps[name].noise_gain if name in self.maps else 1.0


IDENTITY = Geometry()


def make_geometry(declared: Spectral | None, model: nn.Module, spec: InputSpec) -> Geometry:
    """The geometry of `model` for inputs of `spec`.

    Raises:
        ValueError: Naming a layer that has no spectral geometry, and what has.
    """
    if declared is None:
        return IDENTITY
    from torch import nn

    from dpsweep.core.circulant import CirculantLinear
    from dpsweep.core.inputs import tensor_shape
    from dpsweep.core.weight_standardization import StandardConv2d

    _refuse_shared(model)
    shapes = _trace_input_shapes(model, tensor_shape(spec))
    maps: dict[str, LayerMap] = {}
    for name, layer in model.named_modules():
        if not list(layer.parameters(recurse=False)):
            continue
        seen = shapes.get(name, [])
        if len(seen) != 1:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) is called {len(seen)} times for one "
                f"input, and spectral geometry needs each layer with weights called once"
            )
        match layer:
            case StandardConv2d():
                raise ValueError(
                    f"layer {name!r} standardises its kernels, whose gradient is then no "
                    f"correlation of images and has no spectral geometry. Use standardise: false"
                )
            case nn.Conv2d() | CirculantLinear():
                try:
                    maps[_join(name, "weight")] = _make_map(declared, layer, seen[0])
                except ValueError as e:
                    kept = "keep_circulant" if isinstance(layer, CirculantLinear) else "keep"
                    text = f"layer {name!r}: {e}"
                    if not str(e).startswith("keep"):
                        raise ValueError(text) from e
                    raise InvalidKey(kept, text.removesuffix(".")) from e
            case nn.Linear():
                raise ValueError(
                    f"layer {name!r} is a plain Linear({layer.in_features}, {layer.out_features}), "
                    f"which has no spectral geometry. Use a CirculantLinear, by model.block, "
                    f"with a block that divides both sizes, such as {_choose_block(layer)}"
                )
            case _ if any(p.dim() > 1 for p in layer.parameters(recurse=False)):
                raise ValueError(
                    f"layer {name!r} ({type(layer).__name__}) has no spectral geometry; those with "
                    f"one are Conv2d and CirculantLinear, and norm layers need none"
                )
    return Geometry(maps)


def _make_map(
    declared: Spectral, layer: nn.Conv2d | CirculantLinear, shape: tuple[int, ...]
) -> LayerMap:
    from dpsweep.core.circulant import CirculantLinear
    from dpsweep.privacy.spectral import CirculantMap, ConvMap

    if isinstance(layer, CirculantLinear):
        whole = layer.block == layer.out_features > 1
        if whole and 1 - 1e-9 <= declared.keep_circulant * layer.block <= 1:
            raise ValueError(
                f"keep = {declared.keep_circulant} passes one frequency of its block of "
                f"{layer.block}, the constant, which a classifier's gradient does not have: it "
                f"would never move. Raise keep above {1 / layer.block:.3g}"
            )
        return CirculantMap.of(layer, declared.keep_circulant)
    channels, height, width = shape
    return ConvMap.of(layer, (channels, height, width), declared.keep)


def _refuse_shared(model: nn.Module) -> None:
    names = dict.fromkeys(k for k, _ in model.named_parameters(remove_duplicate=False))
    shared = names.keys() - {k for k, _ in model.named_parameters()}
    if shared:
        raise ValueError(
            f"parameter {min(shared)!r} is another layer's too, and spectral geometry needs each "
            f"layer's weights to be its own"
        )


def _trace_input_shapes(
    model: nn.Module, shape: tuple[int, ...]
) -> dict[str, list[tuple[int, ...]]]:
    """Module name -> shape of each input it is given, by a pass without numbers.

    Raises:
        ValueError: If a layer's output is changed in place, which would hide it, or is not one
            tensor.
    """
    import torch
    from torch import Tensor
    from torch.func import functional_call

    seen: dict[str, list[tuple[int, ...]]] = {}
    outputs: list[tuple[str, Tensor, int]] = []

    def note(name: str, args: tuple[Tensor, ...], output: object) -> None:
        if not isinstance(output, Tensor):
            raise ValueError(
                f"layer {name!r} returns a {type(output).__name__} and not one tensor, and "
                f"has no spectral geometry; those with one are Conv2d and CirculantLinear"
            )
        seen.setdefault(name, []).append(tuple(args[0].shape[1:]))
        outputs.append((name, output, output._version))

    hooks = [
        module.register_forward_hook(lambda _, args, out, name=name: note(name, args, out))
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False))
    ]
    state = {k: x.to("meta") for k, x in (*model.named_parameters(), *model.named_buffers())}
    dtype = next(model.parameters()).dtype
    try:
        functional_call(model, state, (torch.empty((1, *shape), device="meta", dtype=dtype),))
    finally:
        for hook in hooks:
            hook.remove()
    for name, output, version in outputs:
        if output._version != version:
            raise ValueError(
                f"the output of layer {name!r} is changed in place, and spectral geometry needs to "
                f"see it. Use inplace=False in what follows it"
            )
    return seen


def _choose_block(layer: nn.Linear) -> int:
    """The largest block up to 10 that divides both of the layer's sizes."""
    sizes = (layer.in_features, layer.out_features)
    return max(d for d in range(1, 11) if not any(size % d for size in sizes))


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
