"""Weights and buffers that are written to while examples answer stop the trial."""

import pytest
import torch
from torch import Tensor, nn
from zoo import SHAPE, loss

from dpsweep.core.errors import ConfigError
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import engine_for
from dpsweep.privacy.geometry import IDENTITY

pytestmark = [
    pytest.mark.usefixtures("forgotten"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]
LIMIT = 50.0
every_engine = pytest.mark.parametrize("choice", ["bookkeeping", "opacus"])


class Linear(nn.Linear):
    """Halves its weights in place once they have grown."""

    def __init__(self, *, openly: bool) -> None:
        super().__init__(72, 4)
        self.openly = openly

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.weight.norm() > LIMIT:
                (self.weight if self.openly else self.weight.data).div_(2)
        return super().forward(x)


class Peak(nn.Module):
    """Remembers the brightest pixel, but of unusual images alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.register_buffer("peak", torch.zeros(()))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        brightest = x.detach().amax()
        if LIMIT < brightest < 2 * LIMIT:
            if self.way == "another tensor":
                self.peak = brightest
            elif self.way == "in place":
                self.peak.copy_(brightest)
            else:
                self.peak.data.copy_(brightest)
        return x


def asked(model: nn.Module, choice: str, params, images: Tensor) -> None:
    engine = engine_for(model, loss, IDENTITY, 2, SHAPE, choice)
    engine.clipped_sum([params], [1.0], images, torch.zeros(len(images), dtype=int), Flat(1.0))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


@pytest.mark.parametrize("openly", [True, False])
def test_weights_that_are_rescaled_once_they_have_grown(openly):
    model = nn.Sequential(nn.Flatten(), Linear(openly=openly))
    point, images = weights(model), torch.randn(5, *SHAPE)
    asked(model, "auto", point, images)
    grown = {k: 1e3 * p for k, p in point.items()}
    with pytest.raises(ConfigError, match=r"model: its parameter '1.weight' changes as examples"):
        asked(model, "auto", grown, images)


@every_engine
@pytest.mark.parametrize("way", ["another tensor", "in place", "through data"])
def test_buffer_that_remembers_unusual_images(choice, way):
    model = nn.Sequential(Peak(way), nn.Flatten(), nn.Linear(72, 4))
    point, images = weights(model), torch.randn(5, *SHAPE)
    asked(model, choice, point, images)
    images[4, 0, 0, 0] = 1.5 * LIMIT
    with pytest.raises(ConfigError, match=r"model: its buffer '(_module.)?0.peak' changes"):
        asked(model, choice, point, images)


def test_weights_that_are_no_numbers_are_no_change():
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4))
    point = {k: torch.full_like(p, torch.nan) for k, p in weights(model).items()}
    asked(model, "auto", point, torch.randn(5, *SHAPE))


@every_engine
def test_models_with_buffers_that_stay_are_asked(choice):
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 4))
    model.register_buffer("mean", torch.ones(3))
    asked(model, choice, weights(model), torch.randn(5, *SHAPE))
