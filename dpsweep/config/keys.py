"""Dotted keys of a trial config that code refers to, and how a config is flattened to such keys."""

from collections.abc import Mapping
from typing import Any

EPSILON = "privacy.epsilon"
DELTA = "privacy.delta"
SCOPE = "privacy.scope"
NOISE_MULTIPLIER = "privacy.noise_multiplier"
CLIP_NORM = "privacy.clip_norm"
CLIPPING = "privacy.clipping"
METHOD_NAME = "method.name"
LEARNING_RATE = "optimizer.lr"
TOTAL_STEP = "optimizer.total_step"
FLOOR = "optimizer.floor"
OPTIMIZER_NAME = "optimizer.name"
BATCH_SIZE = "train.batch_size"
EPOCHS = "train.epochs"
EVALUATE_EVERY = "train.evaluate_every"
ENGINE = "train.engine"
PRECISION = "train.precision.forward"
AUGMENT = "train.augment"
DATA_SIZE = "data.size"
"""N, the number of training examples; a formula may name it, and no config holds it."""


def path_of(key: str) -> tuple[str, ...]:
    """Return the path of a dotted key."""
    return tuple(key.split("."))


def format_path(path: tuple[str | int, ...]) -> str:
    """Return the dotted key of a path."""
    return ".".join(map(str, path))


def flatten(tree: Mapping[str, Any], prefix: str = "", *, empty: bool = True) -> dict[str, Any]:
    """Flatten nested mappings to dotted keys.

    Args:
        prefix: Stands before every key.
        empty: Whether None and empty mappings are kept.

    >>> flatten({"method": {"name": "disk", "kappa": 0.7}, "model": {}}, empty=False)
    {'method.name': 'disk', 'method.kappa': 0.7}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}.", empty=empty))
        elif empty or value not in (None, {}):
            flat[f"{prefix}{key}"] = value
    return flat
