"""Which layers answer in a space of their own, and which models have none."""

import math

import pytest
import torch
from torch import Tensor, nn

from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.types import Released
from dpsweep.models.cnn import Cnn5, CnnSmall
from dpsweep.models.spectral import Model3
from dpsweep.privacy.engine import make_engine
from dpsweep.privacy.geometry import IDENTITY, Spectral, make_geometry
from dpsweep.privacy.spectral import CirculantMap, ConvMap

SHAPE = (2, 8, 8)
SPECTRAL = Spectral(keep=0.5, keep_circulant=0.25)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Sequential(nn.Tanh(), nn.Conv2d(4, 4, 3, bias=False)),
        nn.Flatten(),
        nn.LayerNorm(144),
        CirculantLinear(144, 12, block=4),
    )


def test_without_a_declaration_there_is_no_map_whatever_the_model():
    unmappable = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.Linear(3, 3))
    assert make_geometry(None, unmappable, SHAPE) == IDENTITY
    assert not IDENTITY.maps


def test_weights_of_convolutions_and_circulant_layers_have_maps_and_nothing_else_has():
    maps = make_geometry(SPECTRAL, network(), SHAPE).maps
    assert {k: type(layer) for k, layer in maps.items()} == {
        "0.weight": ConvMap,
        "2.1.weight": ConvMap,
        "5.weight": CirculantMap,
    }


def test_a_model_that_is_one_layer_has_its_map_under_the_parameters_own_name():
    assert set(make_geometry(SPECTRAL, nn.Conv2d(2, 4, 3), SHAPE).maps) == {"weight"}
    assert set(make_geometry(SPECTRAL, CirculantLinear(8, 8, 4), (8,)).maps) == {"weight"}


@pytest.mark.parametrize(
    "config", [CnnSmall(width=5, block=5), CnnSmall(width=4, block=2), Cnn5(), Model3(block=8)]
)
def test_our_models_have_a_geometry(config):
    model = config.build((1, 8, 8), 10)
    maps = make_geometry(Spectral(0.5, 0.5), model, (1, 8, 8)).maps
    wide = {k for k, p in model.named_parameters() if p.dim() > 1}
    assert set(maps) == wide


def test_asking_for_shapes_computes_nothing_and_leaves_no_hook_behind():
    model = network()
    before = {k: p.clone() for k, p in model.named_parameters()}
    state = torch.get_rng_state()
    make_geometry(SPECTRAL, model, SHAPE)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], p) for k, p in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_shapes_are_told_for_models_without_numbers_and_in_double():
    with torch.device("meta"):
        empty = network()
    for model in (empty, network().double()):
        assert len(make_geometry(SPECTRAL, model, SHAPE).maps) == 3


def test_noise_gain_is_a_maps_own_and_one_elsewhere():
    geometry = make_geometry(SPECTRAL, network(), SHAPE)
    for name in ("0.bias", "1.weight", "4.weight", "5.bias"):
        assert geometry.noise_gain(name) == 1.0
    # keep^2 on both axes of a convolution (the paper's Corollary 1), keep in a block.
    assert geometry.noise_gain("0.weight") == pytest.approx(0.5**2, rel=1e-3)
    assert geometry.noise_gain("2.1.weight") == pytest.approx(0.5**2, rel=1e-3)
    assert geometry.noise_gain("5.weight") == pytest.approx(0.25, rel=1e-12)
    assert IDENTITY.noise_gain("0.weight") == 1.0


@pytest.mark.parametrize("name", ["0.weight", "2.1.weight", "5.weight"])
def test_noise_gain_is_measured_on_restored_white_noise(name):
    geometry, rng, num = make_geometry(SPECTRAL, network(), SHAPE), torch.Generator(), 200
    rng.manual_seed(0)
    white = torch.randn(num, *geometry.maps[name].white_shape, generator=rng, dtype=torch.float64)
    restored = torch.stack([geometry.restore(Released({name: x}))[name] for x in white])
    # Entries of one restored kernel or block are correlated, at worst all that come from the same
    # r whitened coordinates: the mean square then is that of num * p * q draws at the least.
    fewest = num * math.prod(geometry.maps[name].white_shape[:2])
    assert restored.square().mean().item() == pytest.approx(
        geometry.noise_gain(name), rel=5 * math.sqrt(2 / fewest)
    )  # five standard deviations: one false alarm in two million


def test_restoring_touches_mapped_parameters_alone():
    geometry = make_geometry(SPECTRAL, network(), SHAPE)
    white = {k: x for k, x in network().state_dict().items() if k not in geometry.maps}
    white |= {k: torch.ones(layer.white_shape) for k, layer in geometry.maps.items()}
    restored = geometry.restore(Released(white))
    shapes = {k: p.shape for k, p in network().named_parameters()}
    assert {k: x.shape for k, x in restored.items()} == shapes
    assert list(restored) == list(white)
    for k, x in white.items():
        assert k in geometry.maps or restored[k] is x


class Twice(nn.Module):
    """Calls its one convolution twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, inputs_B: Tensor) -> Tensor:
        return self.conv(self.conv(inputs_B))


class Idle(nn.Module):
    """Has a norm layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3), nn.GroupNorm(1, 2)

    def forward(self, inputs_B: Tensor) -> Tensor:
        return self.conv(inputs_B)


class Dense(nn.Module):
    """A dense layer of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(3, 128))

    def forward(self, inputs_B: Tensor) -> Tensor:
        return inputs_B.flatten(1) @ self.matrix.T


WITHOUT = [
    (
        nn.Sequential(nn.Flatten(), nn.Linear(128, 12)),
        r"layer '1' is a plain Linear\(128, 12\), .* Use a CirculantLinear, by model\.block, "
        r"with a block that divides both sizes, such as 4",
    ),
    (nn.Sequential(nn.Flatten(), nn.Linear(128, 7)), r"divides both sizes, such as 1$"),
    (
        nn.Sequential(nn.Conv2d(2, 4, 3, stride=2)),
        r"layer '0': Spectral-DP handles Conv2d with stride = \(1, 1\), got \(2, 2\)\. Use stride",
    ),
    (nn.Sequential(nn.Conv2d(2, 4, 3, dilation=2)), r"layer '0': .* dilation = \(1, 1\), got"),
    (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2)), r"layer '0': .* groups = 1, got 2"),
    (Twice(), r"layer 'conv' \(Conv2d\) is called 2 times for one input"),
    (Idle(), r"layer 'norm' \(GroupNorm\) is called 0 times for one input"),
    (
        nn.Sequential(Dense()),
        r"layer '0' \(Dense\) has no spectral geometry; those with one are Conv2d and Circulant",
    ),
    (
        nn.Sequential(nn.ConvTranspose2d(2, 3, 3)),
        r"layer '0' \(ConvTranspose2d\) has no spectral geometry",
    ),
]


@pytest.mark.parametrize(("model", "message"), WITHOUT, ids=[message for _, message in WITHOUT])
def test_model_without_a_spectral_geometry_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        make_geometry(SPECTRAL, model, SHAPE)


def test_block_that_the_message_names_can_be_built():
    for sizes in ((128, 12), (128, 7), (30, 20)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(*sizes))
        with pytest.raises(ValueError, match="such as") as caught:
            make_geometry(SPECTRAL, model, (sizes[0],))
        block = int(str(caught.value).split()[-1])
        assert make_geometry(Spectral(1.0, 1.0), CirculantLinear(*sizes, block), (sizes[0],)).maps


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.5, math.nan])
def test_share_outside_the_unit_interval_is_refused(keep):
    with pytest.raises(ValueError, match=r"keep must lie in \(0, 1\], got"):
        make_geometry(Spectral(keep, 0.5), nn.Conv2d(2, 4, 3), SHAPE)
    with pytest.raises(ValueError, match=r"keep must lie in \(0, 1\], got"):
        make_geometry(Spectral(0.5, keep), CirculantLinear(8, 4, 4), (8,))


def test_share_below_one_frequency_names_the_least_that_works():
    model = nn.Sequential(nn.Flatten(), CirculantLinear(128, 4, block=2))
    with pytest.raises(
        ValueError, match=r"layer '1': keep = 0\.25 passes 0\.5 of .*Raise keep to 0\.5 or"
    ):
        make_geometry(SPECTRAL, model, SHAPE)


def test_a_head_that_would_see_the_constant_alone_is_refused():
    with pytest.raises(ValueError, match=r"one frequency of its block of 4.*above 0\.25"):
        make_geometry(SPECTRAL, CirculantLinear(8, 4, 4), (8,))
    assert make_geometry(Spectral(0.5, 0.26), CirculantLinear(8, 4, 4), (8,)).maps


def test_an_output_that_is_no_tensor_is_refused():
    with pytest.raises(ValueError, match=r"layer '' returns a tuple and not one tensor"):
        make_geometry(SPECTRAL, nn.LSTM(4, 2), (3, 4))


def test_an_output_that_is_changed_in_place_is_refused():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True))
    with pytest.raises(ValueError, match=r"output of layer '0' is changed in place"):
        make_geometry(SPECTRAL, model, SHAPE)


def test_weights_shared_between_layers_are_refused():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1))
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"parameter '1\.weight' is another layer's too"):
        make_geometry(SPECTRAL, model, SHAPE)


def test_a_layer_that_mixes_examples_is_refused_by_every_engine():
    for geometry in (IDENTITY, make_geometry(SPECTRAL, nn.Conv2d(2, 4, 3), SHAPE)):
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
        with pytest.raises(ValueError, match=r"layer '1' is a BatchNorm2d, .* Use GroupNorm"):
            make_engine(model, nn.functional.cross_entropy, geometry, 8, SHAPE)
