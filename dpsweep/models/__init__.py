"""The table of models. None mixes examples (no batch norm), so each has a gradient of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, get_args

from pydantic import Field

from dpsweep.core.seeds import derive_public_seed
from dpsweep.data.base import Spec
from dpsweep.models import cnn, huggingface, mlp, own, resnet, spectral, vit
from dpsweep.models.parts import Model

if TYPE_CHECKING:
    from torch import nn

ModelConfig = Annotated[
    cnn.CnnSmall
    | cnn.CnnPapernot
    | cnn.Cnn5
    | cnn.LeNet5
    | mlp.Linear
    | mlp.Mlp4
    | mlp.Mlp4Circulant
    | spectral.Model2
    | spectral.Model3
    | resnet.Wrn16
    | resnet.Wrn28
    | resnet.Wrn40
    | resnet.ResNet18
    | vit.VitSmall
    | own.Torchvision
    | own.Timm
    | huggingface.HuggingFace
    | own.Own,
    Field(discriminator="name"),
]
"""Any model, told apart by `name`."""

MODELS: dict[str, type[Model]] = {
    kind.model_fields["name"].default: kind for kind in get_args(get_args(ModelConfig)[0])
}
"""The same by name."""


def build_model(config: Model, spec: Spec, seed: int) -> nn.Module:
    """The model with torch's own initial weights, drawn from the public seed, or its file's.

    Raises:
        ValueError: If it does not fit the data; an InvalidKey names the key to change.
    """
    import torch

    from dpsweep.models.transfer import transfer_weights

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_public_seed(seed, "weights"))
        return transfer_weights(config.build_for(spec), config)
