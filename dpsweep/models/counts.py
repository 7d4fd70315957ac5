"""Number of weights of each model for each data set, without building it.

They are stored in counts.json, so that listing models loads no torch; tests/models/test_counts.py
counts them anew. Write the file again after a change with: python -m dpsweep.models.counts
"""

import json
from functools import cache
from importlib.resources import files

from dpsweep.data.datasets import SPECS
from dpsweep.models import MODELS, build_model

_STORED = files("dpsweep.models") / "counts.json"
_OF_OTHER_PACKAGES = ("torchvision", "timm", "huggingface", "own")

Counts = dict[str, dict[str, int | str]]
"""Model -> data set -> number of weights, or why the model does not take its images."""


def stored_num_weights(model: str, data: str) -> int | str | None:
    """Number of weights, or why there is none; None for models of other packages."""
    return None if model in _OF_OTHER_PACKAGES else _load_counts()[model][data]


def count_weights() -> Counts:
    """Build every model for every data set, without memory for its weights, and count."""
    return {
        name: {data: _count_weights(name, data) for data in SPECS}
        for name in MODELS
        if name not in _OF_OTHER_PACKAGES
    }


@cache
def _load_counts() -> Counts:
    counts: Counts = json.loads(_STORED.read_text())
    return counts


def _count_weights(name: str, data: str) -> int | str:
    import torch

    try:
        with torch.device("meta"):
            model = build_model(MODELS[name].model_validate({"name": name}), SPECS[data], 0)
    except ValueError as e:
        return str(e)
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    with open(str(_STORED), "w") as file:
        file.write(json.dumps(count_weights(), indent=1) + "\n")
