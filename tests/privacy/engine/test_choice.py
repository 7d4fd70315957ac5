"""The engine is the one that is asked for; auto falls back, says so once, and never mixes."""

import logging

import pytest
import torch
from torch import Tensor, nn
from zoo import SHAPE, Gate, Net, loss

from dpsweep.core.errors import ConfigError
from dpsweep.core.types import EngineName
from dpsweep.privacy.engine import (
    BookkeepingEngine,
    Engine,
    VmapEngine,
    make_engine,
    refuse_unsupported_layers,
)
from dpsweep.privacy.engine.opacus import OpacusEngine
from dpsweep.privacy.geometry import IDENTITY, Geometry, Spectral, make_geometry

pytestmark = [
    pytest.mark.usefixtures("forgotten"),
    pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule"),
]
KINDS = {
    "auto": BookkeepingEngine,
    "bookkeeping": BookkeepingEngine,
    "vmap": VmapEngine,
    "opacus": OpacusEngine,
}


def sound() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 4))


def pooled() -> nn.Module:
    """Takes images of any size."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def unsound() -> nn.Module:
    """Cannot be recorded: the convolution's weight is used without it."""

    def forward(net: Net, x: Tensor) -> Tensor:
        return (net.conv(x) + nn.functional.conv2d(x.sin(), net.conv.weight)).flatten(1)

    return Net(forward, conv=nn.Conv2d(2, 3, 3))


def boxed() -> nn.Module:
    return Net(
        lambda net, x: net.curve(net.gate(x[:, 0], x[:, 1])).flatten(1),
        gate=Gate(),
        curve=nn.PReLU(6),
    )


def spectral() -> Geometry:
    return make_geometry(Spectral(0.5, 0.5), nn.Sequential(nn.Conv2d(2, 3, 3)), SHAPE)


def chosen(model: nn.Module, choice: EngineName = "auto", geometry: Geometry = IDENTITY) -> Engine:
    return make_engine(model, loss, geometry, 5, SHAPE, choice)


@pytest.mark.parametrize("choice", KINDS)
def test_engine_is_the_one_asked_for(caplog, choice):
    model = sound()
    engine = chosen(model, choice)
    assert type(engine) is KINDS[choice]
    assert engine.model is model
    assert engine.max_physical_batch == 5
    assert caplog.text == ""


@pytest.mark.parametrize("choice", ["auto", "bookkeeping"])
def test_geometry_is_handed_on(choice):
    engine = chosen(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten()), choice, spectral())
    assert isinstance(engine, BookkeepingEngine)
    assert set(engine.geometry.maps) == {"0.weight"}


def test_auto_falls_back_to_vmap_and_says_so_once(caplog):
    for _ in range(3):
        assert type(chosen(unsound())) is VmapEngine
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "Net is computed by vmap as a whole, which is slower "
        "(the gradient of 'conv.weight' is not that of autograd, one example at a time)"
    )


def mixing(shares_from: int) -> nn.Module:
    """Subtracts the mean over the batch, if it is that large."""

    def forward(net: Net, x: Tensor) -> Tensor:
        out = net.conv(x).flatten(1)
        return out - out.mean(0) if len(out) >= shares_from else out

    return Net(forward, conv=nn.Conv2d(2, 3, 3))


@pytest.mark.parametrize("shares_from", [2, 4])
@pytest.mark.parametrize("choice", ["auto", "bookkeeping"])
def test_model_that_mixes_a_batch_is_refused_and_not_fallen_back_from(caplog, choice, shares_from):
    with pytest.raises(ValueError, match=r"examples mix.*train\.engine: vmap"):
        chosen(mixing(shares_from), choice)
    assert caplog.text == ""
    assert type(chosen(mixing(shares_from), "vmap")) is VmapEngine


def test_bookkeeping_is_refused_where_records_would_be_wrong():
    with pytest.raises(
        ValueError,
        match=r"cannot be recorded one by one \(the gradient of 'conv.weight' is not that of",
    ):
        chosen(unsound(), "bookkeeping")


def test_spectral_geometry_is_refused_where_records_would_be_wrong(caplog):
    geometry = Geometry({"conv.weight": spectral().maps["0.weight"]})
    with pytest.raises(ValueError, match="cannot be recorded one by one"):
        chosen(unsound(), "auto", geometry)
    assert caplog.text == ""


@pytest.mark.parametrize("choice", ["vmap", "opacus"])
def test_engines_of_plain_gradients_refuse_a_spectral_geometry(choice):
    text = f"engine {choice} computes plain gradients, and this method's are spectral. Use auto"
    with pytest.raises(ValueError, match=text):
        chosen(nn.Sequential(nn.Conv2d(2, 3, 3)), choice, spectral())


def test_black_boxes_are_said_once(caplog):
    for _ in range(3):
        assert type(chosen(boxed())) is BookkeepingEngine
    (line,) = caplog.records
    assert line.getMessage() == (
        "computed by vmap, being unknown to book-keeping: 'gate' (Gate), 'curve' (PReLU)"
    )


def test_black_boxes_of_another_model_are_said_too(caplog):
    chosen(boxed())
    chosen(nn.Sequential(nn.Flatten(), nn.PReLU(72)))
    assert [line.getMessage().count("PReLU") for line in caplog.records] == [1, 1]


@pytest.mark.parametrize("choice", KINDS)
@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)],
    ids=lambda layer: type(layer).__name__,
)
def test_layer_that_mixes_examples_is_refused(choice, layer):
    text = f"layer '1' is a {type(layer).__name__}, which mixes examples: .* Use GroupNorm"
    with pytest.raises(ValueError, match=text):
        chosen(nn.Sequential(nn.Conv2d(2, 2, 3), layer), choice)


DROPPING = {
    "Dropout": nn.Dropout(0.1),
    "Dropout2d": nn.Dropout2d(0.1),
    "AlphaDropout": nn.AlphaDropout(0.1),
    "MultiheadAttention": nn.MultiheadAttention(6, 2, dropout=0.1),
    "LSTM": nn.LSTM(6, 4, num_layers=2, dropout=0.1),
}


@pytest.mark.parametrize("choice", KINDS)
@pytest.mark.parametrize("kind", DROPPING)
def test_layer_that_drops_at_random_is_refused(kind, choice):
    text = rf"layer '1' \({kind}\) drops at random, .* Set its probability to 0"
    with pytest.raises(ValueError, match=text):
        chosen(nn.Sequential(nn.Conv2d(2, 2, 3), DROPPING[kind]), choice)


def test_dropout_within_a_layer_is_found():
    with pytest.raises(ValueError, match=r"layer 'self_attn' \(MultiheadAttention\) drops"):
        refuse_unsupported_layers(nn.TransformerEncoderLayer(6, 2, 8))


@pytest.mark.parametrize("choice", KINDS)
def test_embedding_that_rescales_rows_or_has_sparse_gradients_is_refused_by_every_engine(choice):
    net = nn.Sequential(nn.Flatten(), nn.Embedding(7, 4, max_norm=1.0))
    with pytest.raises(ValueError, match=r"'1' \(Embedding\) rescales .* Leave max_norm out"):
        chosen(net, choice)
    net = nn.Sequential(nn.Flatten(), nn.Embedding(7, 4, sparse=True))
    with pytest.raises(ValueError, match=r"'1' \(Embedding\) has sparse gradients.* Leave sparse"):
        chosen(net, choice)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.0),
        nn.Dropout(0),
        nn.MultiheadAttention(6, 2, dropout=0.0),
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0),
        nn.GroupNorm(1, 2),
        nn.InstanceNorm2d(2),
        nn.LayerNorm(6),
    ],
    ids=repr,
)
def test_layer_that_neither_mixes_nor_drops_is_allowed(layer):
    refuse_unsupported_layers(nn.Sequential(layer))


def test_net_with_dropout_of_zero_is_recorded(caplog):
    net = nn.Sequential(nn.Dropout2d(0.0), nn.Flatten(), nn.Dropout(0.0), nn.Linear(72, 4))
    assert type(chosen(net)) is BookkeepingEngine
    assert caplog.text == ""


@pytest.mark.parametrize("choice", ["auto", "bookkeeping"])
def test_running_statistics_of_the_data_are_refused(choice):
    net = nn.Sequential(nn.InstanceNorm2d(2, affine=True, track_running_stats=True), nn.Flatten())
    before = {k: x.clone() for k, x in net.state_dict().items()}
    text = r"model: buffer 'running_mean' of module '0' \(InstanceNorm2d\) depends on the images"
    with pytest.raises(ConfigError, match=text):
        chosen(net, choice)
    assert all(torch.equal(x, before[k]) for k, x in net.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choice", KINDS)
def test_weights_that_are_too_coarse_are_refused(choice, dtype):
    with pytest.raises(ValueError, match=f"its weights are {dtype}, too coarse"):
        chosen(sound().to(dtype), choice)


def asked_of(monkeypatch) -> list[nn.Module]:
    """The models that are tried, as they are."""
    asked: list[nn.Module] = []
    monkeypatch.setattr(
        "dpsweep.privacy.engine.find_wrong_gradients", lambda model, *_: asked.append(model)
    )
    return asked


def test_kind_that_is_known_is_tried_once(monkeypatch):
    asked = asked_of(monkeypatch)
    models = [pooled(), pooled(), pooled().double(), pooled()]
    kinds = ["a", "a", "a", "b"]
    for _ in range(2):
        for model, kind in zip(models, kinds, strict=True):
            make_engine(model, loss, IDENTITY, 5, SHAPE, kind=kind)
    make_engine(models[0], loss, IDENTITY, 5, (2, 8, 8), kind="a")
    assert asked == [models[0], models[2], models[3], models[0]]


def test_model_of_no_known_kind_is_tried_each_time(monkeypatch):
    asked = asked_of(monkeypatch)
    models = [sound(), sound()]
    for model in models:
        chosen(model)
    assert asked == models


def test_vmap_is_tried_too_and_not_for_mixing_which_it_cannot_do(monkeypatch):
    asked = asked_of(monkeypatch)
    monkeypatch.setattr("dpsweep.privacy.engine.find_mixing_sizes", None)
    model = sound()
    chosen(model, "vmap")
    assert asked == [model]
