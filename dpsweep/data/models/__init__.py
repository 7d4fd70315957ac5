"""The table of models. None mixes examples (no batch norm), so each answers for itself."""

from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from dpsweep.core.seeds import public_seed
from dpsweep.data.datasets import Spec
from dpsweep.data.models import cnn, spectral, wrn

ModelConfig = Annotated[
    cnn.CnnSmall | cnn.Cnn5 | spectral.Model2 | spectral.Model3 | wrn.Wrn16 | wrn.Wrn28 | wrn.Wrn40,
    Field(discriminator="name"),
]
"""Any model, told apart by `name`."""


def build(config: ModelConfig, spec: Spec, seed: int) -> nn.Module:
    """The model with torch's own initial weights, drawn from the public seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(public_seed(seed, "weights"))
        return config.build(spec.shape, spec.num_classes)
