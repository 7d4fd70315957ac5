"""Scattering features are those of each image alone, made once, and trained on like pixels."""

import subprocess
import sys
from importlib.metadata import version
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import scipy.fft
import torch
from pydantic import ValidationError
from torch.nn.functional import adaptive_avg_pool2d, group_norm

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.seeds import Secret
from dpsweep.data import features, scattering
from dpsweep.data.datasets import ImageData
from dpsweep.data.features import Patches, Scattering
from dpsweep.data.read import fingerprint_images, load_dataset
from dpsweep.data.scattering import Filters, FrequencyWhitening, Whitening, draw_noise_images
from dpsweep.data.scattering import compute_scattering as compute_and_report
from dpsweep.training.assemble import assemble_step, check_fit, initial_params
from dpsweep.training.evaluate import evaluate

KEY = b"k" * 32

SCATTERED = {"name": "digits", "features": {"name": "scattering"}}
TRIAL = {
    "data": SCATTERED,
    "model": {"name": "linear", "groups": 27},
    "privacy": {"epsilon": 8, "clip_norm": 0.1},
    "train": {"batch_size": 256, "epochs": 8, "device": "cpu"},
    "optimizer": {"lr": 8.0},
    "method": {"name": "dp_sgd"},
}


@pytest.fixture(autouse=True, scope="module")
def common():
    """Where features are kept; what another file's test read in this process is forgotten."""
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPSWEEP_CACHE", place)
        load_dataset.cache_clear()
        yield
    load_dataset.cache_clear()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A place of a test's own."""
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    load_dataset.cache_clear()
    yield tmp_path / "cache"
    load_dataset.cache_clear()


@pytest.fixture
def noise(monkeypatch):
    """Fewer grey noise images than else are drawn, as bytes."""
    monkeypatch.setattr(scattering, "_NOISE_IMAGES", 300)
    return (draw_noise_images(300, (1, 16, 16)) * 255).to(torch.uint8)


def compute_scattering(some, numbers, config, advance=lambda count: None):
    return compute_and_report(some, advance, numbers=numbers, config=config)


def images(num: int, side: int = 16, channels: int = 1) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, channels, side, side), dtype=torch.uint8, generator=rng)


def unit(some: torch.Tensor) -> torch.Tensor:
    return some.to(torch.float32) / 255


@pytest.mark.parametrize(
    ("depth", "rotations", "paths"), [(2, 8, 81), (1, 8, 9), (3, 8, 217), (2, 4, 25)]
)
def test_shape_that_is_declared_is_the_one_that_is_computed(depth, rotations, paths):
    config = Scattering(depth=depth, rotations=rotations)
    made = compute_scattering(images(2, 20, 3), unit, config)
    assert made.shape == (2, *config.shape((3, 20, 20))) == (2, 3 * paths, 20 >> depth, 20 >> depth)
    assert made.dtype == torch.float16


def test_an_even_image_has_its_own_value_and_no_waves():
    made = compute_scattering(torch.full((1, 1, 16, 16), 51, dtype=torch.uint8), unit, Scattering())
    torch.testing.assert_close(made[0, 0], torch.full((4, 4), 0.2, dtype=torch.float16))
    assert made[0, 1:].abs().max() < 1e-4  # the wavelets have no mean


def test_waves_along_one_axis_answer_at_that_angle_and_turned_ones_at_the_other():
    wave = (127 + 127 * torch.cos(2.2 * torch.arange(16.0))).to(torch.uint8)
    across, down = wave.expand(1, 1, 16, 16), wave[:, None].expand(1, 1, 16, 16)
    first = [compute_scattering(x, unit, Scattering())[0, 1:9].sum((1, 2)) for x in (across, down)]
    best = [int(order.argmax()) for order in first]
    assert (best[0] - best[1]) % 8 == 4  # a right angle is half of the rotations


def test_features_of_an_image_do_not_depend_on_its_place_or_its_companions():
    some = images(301)
    whole = compute_scattering(some, unit, Scattering())
    fewer = torch.cat([compute_scattering(some[:7], unit, Scattering()), whole[8:9]])
    assert torch.equal(fewer[:7], whole[:7])
    without_one = compute_scattering(torch.cat([some[:3], some[4:]]), unit, Scattering())
    assert torch.equal(without_one, torch.cat([whole[:3], whole[4:]]))


def test_groups_of_channels_are_brought_to_one_scale_within_each_image():
    some = images(20)
    plain = compute_scattering(some, unit, Scattering()).float()
    made = compute_scattering(some, unit, Scattering(groups=27)).float()
    torch.testing.assert_close(made, group_norm(plain, 27), rtol=2e-3, atol=2e-2)
    grouped = made.unflatten(1, (27, 3)).flatten(2)
    torch.testing.assert_close(grouped.mean(2), torch.zeros(20, 27), rtol=0, atol=1e-3)
    assert torch.equal(compute_scattering(some[:3], unit, Scattering(groups=27)).float(), made[:3])


@pytest.mark.parametrize("groups", [None, 27])
def test_noise_images_become_white_and_an_image_stays_its_own_affair(groups, noise):
    """Of each direction's variance v there is left v / (v + 0.1 of the mean)."""
    config = Scattering(groups=groups, whiten=0.1)
    plain, made = (
        compute_scattering(noise, unit, each).double().transpose(0, 1).flatten(1)
        for each in (Scattering(groups=groups), config)
    )
    assert made.mean(1).abs().max() < 0.02
    before, after = (torch.linalg.eigvalsh(torch.cov(x)) for x in (plain, made))
    torch.testing.assert_close(after, before / (before + 0.1 * before.mean()), rtol=0.02, atol=1e-3)
    some = images(301)
    whole = compute_scattering(some, unit, config)
    few = torch.cat([some[:3], some[4:9]])
    assert torch.equal(compute_scattering(few, unit, config), torch.cat([whole[:3], whole[4:9]]))


def test_noise_images_become_white_at_each_frequency_and_all_frequencies_alike(noise):
    config = Scattering(groups=27, whiten=0.1, whiten_by="frequency")
    plain, made = (
        scipy.fft.dctn(compute_scattering(noise, unit, each).double(), axes=(2, 3), norm="ortho")
        for each in (Scattering(groups=27), config)
    )
    for frequencies in (plain, made):
        frequencies -= frequencies.mean(0)
    covariances = [np.einsum("nchw,ndhw->hwcd", x, x) / len(x) for x in (plain, made)]
    before, after = (np.linalg.eigvalsh(x) for x in covariances)
    np.testing.assert_allclose(after, before / (before + 0.1 * before.mean()), rtol=0.03, atol=2e-3)


def test_mirrored_image_has_the_same_features_as_the_image():
    some = images(30)
    config = Scattering(groups=27, mirror=True)
    both, plain, mirrored, again = (
        compute_scattering(x, unit, each).float()
        for x, each in (
            (some, config),
            (some, Scattering(groups=27)),
            (some.flip(-1), Scattering(groups=27)),
            (some.flip(-1), config),
        )
    )
    torch.testing.assert_close(both, (plain + mirrored) / 2, rtol=2e-3, atol=2e-3)
    assert torch.equal(both, again)
    assert not torch.allclose(plain, mirrored, atol=0.1)


@pytest.fixture(scope="module")
def patched():
    return Scattering(whiten=0.03, patches={"num": 20, "size": 2, "pool": 2})


def test_patches_are_rectified_answers_of_filters_and_white_on_noise_images(patched, noise):
    """Against unfolded patches in float64; the whitening after them is a linear map."""
    some = images(30)
    whitened = compute_scattering(some, unit, Scattering(whiten=0.03))
    layer = Filters.draw(whitened.float(), patched.patches)
    patches = whitened.double().unfold(2, 2, 1).unfold(3, 2, 1)  # (30, 81, 3, 3, 2, 2)
    answers = torch.einsum("bchwij,kcij->bkhw", patches, layer.filters_KCSS.double())
    sizes = patches.square().mean((1, 4, 5)).sqrt()
    expected = adaptive_avg_pool2d((answers / (sizes[:, None] + 0.3)).relu(), 2)
    torch.testing.assert_close(
        layer.apply(whitened.float()).double(), expected, rtol=1e-4, atol=1e-5
    )
    norms = layer.filters_KCSS.flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(20))

    made = compute_scattering(noise, unit, patched).double()
    assert made.shape == (300, *patched.shape((1, 16, 16))) == (300, 20, 2, 2)
    features = made.transpose(0, 1).flatten(1)
    assert features.mean(1).abs().max() < 0.02
    assert torch.linalg.eigvalsh(torch.cov(features)).max() == pytest.approx(1, abs=0.05)


@pytest.mark.usefixtures("noise")
def test_patches_of_an_image_do_not_depend_on_its_place_or_its_companions(patched):
    some = images(301)
    whole = compute_scattering(some, unit, patched)
    few = torch.cat([some[:3], some[4:9]])
    assert torch.equal(compute_scattering(few, unit, patched), torch.cat([whole[:3], whole[4:9]]))
    assert torch.equal(compute_scattering(some[:1], unit, patched), whole[:1])
    without_one = compute_scattering(torch.cat([some[:3], some[4:]]), unit, patched)
    assert torch.equal(without_one, torch.cat([whole[:3], whole[4:]]))


@pytest.mark.parametrize("channels", [27, 243])
@pytest.mark.parametrize("places", [1, 2, 3, 4, 5, 8])
def test_each_layer_gives_an_image_the_same_bits_in_any_company(places, channels):
    """In float32: half precision would hide most differences."""
    rng = torch.Generator().manual_seed(0)
    some = torch.randn(52, channels, places, places, generator=rng)
    layers = [Whitening.of(some, 0.1), FrequencyWhitening.of(some, 0.1)]
    if places > 1:
        layers.append(Filters.draw(some, Patches(num=50, size=2, pool=1)))
    for layer in layers:
        whole = layer.apply(some)
        without_one = layer.apply(torch.cat([some[:3], some[4:]]))
        assert torch.equal(without_one, torch.cat([whole[:3], whole[4:]]))
        assert torch.equal(layer.apply(some[:1]), whole[:1])


def test_keys_that_are_not_used_leave_a_config_its_identity():
    written = Scattering().model_dump()
    assert written == {"name": "scattering", "depth": 2, "rotations": 8}


def test_opponent_colors_are_scattered_in_the_place_of_red_green_and_blue():
    some = images(5, channels=3)
    to_opponent = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]])
    to_opponent /= to_opponent.norm(dim=1, keepdim=True)
    made = compute_scattering(some, unit, Scattering(colors="opponent"))
    expected = compute_scattering(
        some, lambda x: torch.einsum("ij,bjhw->bihw", to_opponent, unit(x)), Scattering()
    )
    torch.testing.assert_close(made, expected, rtol=2e-3, atol=1e-4)
    grey = compute_scattering(images(5).expand(-1, 3, -1, -1), unit, Scattering(colors="opponent"))
    assert grey[:, :81].abs().max() > 0.1
    assert grey[:, 81:].abs().max() < 1e-3


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"colors": "opponent"}, "colors", "made of three channels, and images have 1"),
        ({"patches": {}}, "patches", "patches are those of whitened features. Give whiten: 0.03"),
        (
            {"whiten": 0.03, "patches": {"size": 8}},
            "patches.size",
            "8 is more than the 7 x 7 places",
        ),
        ({"whiten": 0.03, "patches": {"pool": 6}}, "patches.pool", "6 is more than the 5 places"),
        ({"whiten_by": "frequency"}, "whiten_by", "it says how to whiten. Give whiten: 0.2"),
        ({"depth": 4, "groups": 417}, "groups", "417 groups have one value each, which becomes 0"),
    ],
)
def test_layers_that_do_not_fit_the_images_are_refused(keys, key, message):
    with pytest.raises(InvalidKey, match=message) as caught:
        Scattering.model_validate(keys).shape((1, 28, 28))
    assert caught.value.key == key
    with pytest.raises(ValidationError, match=message):
        ImageData.model_validate({"name": "mnist", "features": {"name": "scattering", **keys}})


def test_noise_images_have_falling_spectra_and_the_same_numbers_each_time():
    made = draw_noise_images(50, (3, 32, 32))
    assert torch.equal(made, draw_noise_images(50, (3, 32, 32)))
    assert 0 <= made.min() < made.max() <= 1
    power = torch.fft.fft2(made - made.mean((2, 3), keepdim=True)).abs().pow(2).mean((0, 1))
    assert power[0, 1] > 2 * power[0, 2] > 8 * power[0, 8]
    red, green = made[:, 0].flatten(1), made[:, 1].flatten(1)
    alike = [
        float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(red, green, strict=True)
    ]
    assert 0.8 < sum(alike) / len(alike) < 0.99


@pytest.mark.parametrize("flags", [[], ["-O"]], ids=["asserts", "no asserts"])
def test_features_that_do_not_fit_are_refused_also_without_asserts(flags):
    code = (
        "from dpsweep.data.datasets import ImageData\n"
        "ImageData.model_validate({'name': 'digits', 'features': {'depth': 4}})"
    )
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "4 averages over 16 x 16 pixels, and images are 8 x 8" in done.stderr


def test_groups_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValidationError, match="10 does not divide the 81 channels"):
        ImageData.model_validate({"name": "mnist", "features": {"groups": 10}})


def test_each_channel_has_its_own_features_one_after_the_other():
    some = images(3, channels=3)
    whole = compute_scattering(some, unit, Scattering()).unflatten(1, (3, 81))
    for i in range(3):
        assert torch.equal(whole[:, i], compute_scattering(some[:, i : i + 1], unit, Scattering()))


def test_model_is_told_the_features_shape_and_the_files_keep_theirs():
    config = ImageData.model_validate({**SCATTERED, "name": "mnist"})
    assert config.spec.shape == (81, 7, 7)
    assert config.stored.shape == (1, 28, 28)
    assert config.num_examples == 60_000
    coloured = ImageData(name="cifar10", features={"name": "scattering", "J": 3})
    assert coloured.spec.shape == (651, 4, 4)


def test_loaded_features_are_those_of_the_images_in_unit_scale_or_by_the_constants():
    pixels = load_dataset(ImageData(name="digits"), 0)
    made = load_dataset(ImageData.model_validate(SCATTERED), 0)
    expected = compute_scattering(pixels.inputs, lambda x: x.float() / 16, Scattering())
    assert torch.equal(made.inputs, expected)
    assert torch.equal(made.targets, pixels.targets)
    assert torch.equal(made.scaled(made.inputs[:5], torch.float32), expected[:5].float())
    twice = {**SCATTERED, "normalise": {"mean": [0.0], "std": [0.5]}}
    doubled = load_dataset(ImageData.model_validate(twice), 0).inputs.float()
    torch.testing.assert_close(doubled, 2 * expected.float(), rtol=2e-3, atol=1e-4)


def test_features_are_computed_once_and_then_mapped(cache):
    config = ImageData.model_validate(SCATTERED)
    first = load_dataset(config, 0)
    kept = {p.name: p.stat().st_mtime_ns for p in cache.glob("*.pt")}
    assert len(kept) == 2  # the images, and their features
    load_dataset.cache_clear()
    again = load_dataset(config, 0)
    assert {p.name: p.stat().st_mtime_ns for p in cache.glob("*.pt")} == kept
    assert torch.equal(first.inputs, again.inputs)
    load_dataset(ImageData.model_validate({"name": "digits", "features": {"rotations": 4}}), 0)
    assert len(list(cache.glob("*.pt"))) == 3  # other features are kept apart


def test_fingerprint_is_that_of_the_images():
    plain = ImageData(name="digits")
    assert fingerprint_images(ImageData.model_validate(SCATTERED), 0, KEY) == fingerprint_images(
        plain, 0, KEY
    )


def test_held_out_examples_are_the_same_ones_as_without_features():
    held = {"validation": "holdout", "holdout_fraction": 0.25}
    made = load_dataset(ImageData.model_validate({**SCATTERED, **held}), 3)
    assert torch.equal(made.targets, load_dataset(ImageData(name="digits", **held), 3).targets)
    assert made.valid_inputs.shape == (359, 81, 2, 2)


def test_linear_model_learns_on_features_with_privacy():
    step = assemble_step(TrialConfig.model_validate(TRIAL), Secret.draw(), torch.device("cpu"))
    progress = step.start(initial_params(step))
    for _ in range(step.plan.run.steps):
        step(progress)
    score = evaluate(step.engine.model, progress.result, step.data, step.dtype)
    assert score["accuracy"] > 0.7  # 0.90 in ten runs, with a deviation of 0.02; chance is 0.1


def test_augmentation_is_refused_with_features():
    train = {**TRIAL["train"], "augment": {"flips": True}}
    with pytest.raises(
        InvalidKey, match=r"data\.features are made of images once, before"
    ) as caught:
        check_fit(TrialConfig.model_validate({**TRIAL, "train": train}))
    assert caught.value.key == "train.augment"


def test_progress_counts_every_image_once():
    counts = []
    compute_scattering(images(301), unit, Scattering(), counts.append)
    assert sorted(counts) == [51, 250]


def test_missing_package_is_told_with_the_command(monkeypatch):
    monkeypatch.setattr(features, "find_spec", lambda name: None)
    message = r"^data\.features: .* kymatio, .* pip install 'dpsweep\[scattering\]'"
    with pytest.raises(ConfigError, match=message):
        ImageData.model_validate(SCATTERED).refuse_missing()
    with pytest.raises(ConfigError, match=r"^data\.features: .* pip install"):
        load_dataset.__wrapped__(ImageData.model_validate(SCATTERED), 0)


def test_images_too_small_for_the_depth_say_both_sizes():
    with pytest.raises(ValidationError, match=r"4 averages over 16 x 16 pixels, .* are 8 x 8"):
        ImageData(name="digits", features={"name": "scattering", "depth": 4})


def test_the_package_is_the_one_that_was_tried():
    assert version("kymatio") == "0.3.0"  # its two-dimensional part is imported from inside
