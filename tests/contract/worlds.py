"""Every variant of every method, and every style of clipping it may have.

A new method joins METHOD_WORLDS; docs/concepts/methods.md has its equation, and world.py shows
how it is watched.
"""

from dataclasses import replace

from world import World, spectral

LOOK_AHEAD = {"name": "look_ahead", "kappa": 0.4, "gamma": 0.5}
MOMENTUM = {"name": "momentum", "points": 3, "decay": 0.8}
LOW_PASS = {"name": "low_pass", "published": "a6_b2_2"}
BANDED = {"name": "banded", "bands": 4}
DESIGN = {"design": {"family": "butterworth", "order": 2, "cutoff": 0.2}}

AUGMENTED = {"augment": {"flips": True, "crops": 1, "multiplicity": 3}, "ema": 0.6}

METHOD_WORLDS: dict[str, World] = {
    "dp_sgd": World({"name": "dp_sgd"}),
    "dp_sgd-secure-noise": World({"name": "dp_sgd"}, source="secure"),
    "dp_sgd-augmented": World({"name": "dp_sgd"}, train=AUGMENTED),
    "dp_sgd-three-devices": World({"name": "dp_sgd"}, num_devices=3),
    "dp_adam": World({"name": "dp_adam"}),
    "dp_adambc": World({"name": "dp_adambc"}),
    "doppler-printed": World({"name": "doppler", "filter": {"published": "a9_b15_m05"}}),
    "doppler-design": World({"name": "doppler", "filter": DESIGN}),
    "disk-published": World({"name": "disk", "kappa": 0.7, "gamma": 0.5}),
    "disk-weights-of-both-signs": World({"name": "disk", "kappa": 0.3, "gamma": 0.5}),
    "disk-augmented": World({"name": "disk", "kappa": 0.3, "gamma": 0.5}, train=AUGMENTED),
    "disk-three-devices": World({"name": "disk", "kappa": 0.3, "gamma": 0.5}, num_devices=3),
    "disk-behind": World({"name": "disk", "kappa": 0.5, "gamma": -1.0}),
    "disk-one-point": World({"name": "disk", "kappa": 0.4, "gamma": "one_point"}),
    "disk-riccati": World({"name": "disk", "gain": "riccati", "gamma": 0.5}),
    "fftkf": World({"name": "fftkf", "kappa": 0.3, "cut": 0.4, "depth": 0.6}),
    "fftkf-split": World({"name": "fftkf", "predictor": "split", "split_share": 0.1}),
    "fftkf-none": World({"name": "fftkf", "predictor": "none"}),
    "fftkf-by-tensor": World({"name": "fftkf", "scope": "tensor", "shape": "butterworth"}),
    "innerouter": World({"name": "innerouter", "points": 3, "decay": 0.8}),
    "dp_pmlf": World({"name": "dp_pmlf", "points": 4, "decay": 0.7}),
    "spectral_dp": World({"name": "spectral_dp"}, "per_layer", spectral),
    "spectral_dp-augmented": World({"name": "spectral_dp"}, "per_layer", spectral, train=AUGMENTED),
    "block_spectral_dp": World({"name": "block_spectral_dp"}, "per_layer", spectral),
    "compose-momentum-shelf-adambc": World(
        {"compose": {"query": MOMENTUM, "filters": [{"name": "shelf"}], "base": "adambc"}}
    ),
    "compose-look-ahead-spectral-low-pass": World(
        {
            "compose": {
                "query": LOOK_AHEAD,
                "filters": [LOW_PASS],
                "geometry": {"name": "spectral", "keep_circulant": 0.5},
            }
        },
        "per_layer",
        spectral,
    ),
    "bandmf": World({"name": "bandmf", "bands": 8}),
    "bandmf-sqrt": World({"name": "bandmf", "bands": 3, "coefficients": "sqrt"}),
    "dp_ftrl": World({"name": "dp_ftrl", "buffers": 2}),
    "compose-look-ahead-low-pass-adambc-banded": World(
        {
            "compose": {
                "query": LOOK_AHEAD,
                "noise": BANDED,
                "filters": [LOW_PASS],
                "base": "adambc",
            }
        }
    ),
    "compose-momentum-buffered": World(
        {"compose": {"query": MOMENTUM, "noise": {"name": "buffered", "buffers": 1}}}
    ),
    "compose-spectral-banded": World(
        {"compose": {"noise": BANDED, "geometry": {"name": "spectral", "keep_circulant": 0.5}}},
        "per_layer",
        spectral,
    ),
    "compose-momentum-spectral": World(
        {
            "compose": {
                "query": MOMENTUM,
                "geometry": {"name": "spectral", "keep_circulant": 0.5},
            }
        },
        "flat",
        spectral,
    ),
}
"""Each with the style of clipping it is used with."""

CORRELATED = ("bandmf", "dp_ftrl", "banded", "buffered")
NOT_ADAPTIVE = {
    "fftkf-split",  # it clips two answers
    *(name for name in METHOD_WORLDS if any(part in name for part in CORRELATED)),
}
"""Worlds in which adaptive clipping is refused."""

STYLES = ("flat", "automatic", "per_layer", "per_layer-given", "adaptive")
WORLDS = {
    f"{name}-{style}": replace(world, style=style)
    for name, world in METHOD_WORLDS.items()
    for style in STYLES
    if not (style == "adaptive" and name in NOT_ADAPTIVE)
}

OWN = {f"{name}-{world.style}" for name, world in METHOD_WORLDS.items()}
"""Every method in its own style: what plain pytest runs of each check. Other worlds are slow."""

OFTEN = OWN | {
    f"{name}-{style}"
    for name in ("dp_sgd", "disk-weights-of-both-signs", "spectral_dp")
    for style in STYLES
}
"""The same, and every style: what plain pytest runs of the checks of sensitivity."""


def rounded(world: World, precision: str) -> World:
    """The same in float32, with forward and backward passes in bf16 or tf32."""
    train = world.train | {"precision": {"forward": precision}}
    return replace(world, dtype="float32", train=train)


def keeping_all(world: World) -> World:
    """The same with every frequency kept, where what is released is the gradient itself."""
    method = world.method
    if "compose" in method:
        geometry = {"name": "spectral", "keep": 1.0, "keep_circulant": 1.0}
        return replace(world, method={"compose": {**method["compose"], "geometry": geometry}})
    block = {"keep_circulant": 1.0} if method["name"] == "block_spectral_dp" else {}
    return replace(world, method={**method, "keep": 1.0, **block})


UNFILTERED = {
    name: keeping_all(world) if world.net is spectral else world for name, world in WORLDS.items()
}
"""The worlds in which a noise-free release is a sum of clipped gradients."""
