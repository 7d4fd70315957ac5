"""Transfer learning: public weights to start from, and frozen layers.

A frozen parameter becomes a buffer: engines ask for gradients of parameters alone, and the noise
of a release has as many coordinates as there are parameters. The weights are public input, like
the architecture; a trial's privacy says nothing about what they were trained on.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dpsweep.core.errors import InvalidKey, list_some, suggest_names
from dpsweep.core.types import Tensors
from dpsweep.models.parts import Model, saved_tensors

_WRAPPINGS = ("state_dict", "model")


def transfer_weights(model: nn.Module, config: Model) -> nn.Module:
    """`model` with the config's weights in it and all but its `train` layers frozen.

    Raises:
        InvalidKey: If the weights cannot be read or do not fit, or a layer is not there.
    """
    if config.fresh is not None and config.weights is None:
        raise InvalidKey(
            "fresh", "says what is not looked up in model.weights, and that is missing"
        )
    if config.weights is not None:
        _refuse_unknown("fresh", config.fresh or (), model)
        _load_weights(model, _read_weights(config.weights), config.fresh or (), config.weights)
    if config.train is not None:
        _refuse_unknown("train", config.train, model)
        freeze(model, config.train)
    return model


def freeze(model: nn.Module, train: Sequence[str], *, persistent: bool = True) -> None:
    """Make buffers of all parameters that are in none of the layers `train`.

    Args:
        train: Names of layers and parameters.
        persistent: False if they need not be saved with the trained weights.
    """
    for place, module in model.named_modules():
        for own, p in list(module.named_parameters(recurse=False)):
            if not _is_below(f"{place}.{own}" if place else own, train):
                delattr(module, own)
                module.register_buffer(own, p.detach(), persistent=persistent)


def _read_weights(weights: str) -> Tensors:
    path = Path(weights).expanduser()
    if not path.is_file():
        raise InvalidKey("weights", f"{weights}: no such file. Give one that torch.save wrote")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # what a file of another kind makes torch raise can be anything
        raise InvalidKey(
            "weights",
            f"{weights}: holds more than plain tensors, or is no file of torch.save. Write one "
            f"with torch.save(model.state_dict(), FILE)",
        ) from e
    for key in _WRAPPINGS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise InvalidKey("weights", f"{weights}: holds no mapping of names to tensors")
    return {str(k).removeprefix("module."): x for k, x in found.items()}


def _load_weights(model: nn.Module, found: Tensors, fresh: Sequence[str], weights: str) -> None:
    own = {k: x for k, x in saved_tensors(model).items() if not _is_below(k, fresh)}
    found = {
        k: x
        for k, x in found.items()
        if not _is_below(k, fresh) and not k.endswith("num_batches_tracked")
    }
    missing, unexpected = own.keys() - found.keys(), found.keys() - own.keys()
    other = [
        f"{k} ({tuple(found[k].shape)}, and the model has {tuple(x.shape)})"
        for k, x in own.items()
        if k in found and found[k].shape != x.shape
    ]
    faults = [
        f"{len(names)} {what}: {list_some(names)}"
        for what, names in (
            ("missing", sorted(missing)),
            ("unexpected", sorted(unexpected)),
            ("of another shape", other),
        )
        if names
    ]
    if faults:
        raise InvalidKey(
            "weights",
            f"{weights} does not fit the model: {'; '.join(faults)}. Name layers that are to start "
            f"anew in model.fresh",
        )
    with torch.no_grad():
        for k, x in own.items():
            if not x.is_meta:
                x.copy_(found[k])


def _refuse_unknown(key: str, layers: Iterable[str], model: nn.Module) -> None:
    names = [k for k, _ in model.named_parameters()]
    for layer in layers:
        if not any(_is_below(name, (layer,)) for name in names):
            known = dict.fromkeys(name.rpartition(".")[0] for name in names)
            raise InvalidKey(
                key, f"{layer!r} names no parameters of the model.{suggest_names(layer, known)}"
            )


def _is_below(name: str, layers: Sequence[str]) -> bool:
    """True if a parameter is one of these, or in one of these layers.

    >>> _is_below("body.0.weight", ("body",)), _is_below("bodyguard.weight", ("body",))
    (True, False)
    """
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)
