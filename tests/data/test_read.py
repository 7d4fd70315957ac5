"""Data sets read as they are declared, split where they say, on pixels alone."""

import os
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from dpsweep.core.errors import ConfigError
from dpsweep.data.datasets import SPECS, ImageData, Normalise
from dpsweep.data.read import Dataset, download_dataset, load_dataset

WITH_FILES = [name for name, spec in SPECS.items() if spec.folder]
OF_TORCHVISION = [name for name in WITH_FILES if name != "tiny_imagenet"]
every_file_set = pytest.mark.parametrize("name", WITH_FILES)


@pytest.fixture(scope="module")
def root():
    """A folder in torchvision's layout with the real files, named by DPSWEEP_TEST_DATA."""
    folder = os.environ.get("DPSWEEP_TEST_DATA")
    if not folder:
        pytest.skip("DPSWEEP_TEST_DATA names no folder of data sets in torchvision's layout")
    return folder


def check_against_spec(data: Dataset, config: ImageData) -> None:
    spec = config.spec
    assert data.inputs.shape == (config.num_examples, *spec.shape)
    assert data.targets.shape == (config.num_examples,)
    num_valid = config.num_held_out or spec.num_test
    assert data.valid_inputs.shape == (num_valid, *spec.shape)
    assert data.valid_targets.shape == (num_valid,)
    assert data.inputs.dtype == data.valid_inputs.dtype == torch.uint8
    assert data.targets.dtype == data.valid_targets.dtype == torch.int64
    for targets in (data.targets, data.valid_targets):
        assert torch.equal(targets.unique(), torch.arange(spec.num_classes))
    assert data.inputs.max() == data.brightest == spec.brightest
    assert data.inputs.min() == 0


def rows(inputs: torch.Tensor, targets: torch.Tensor) -> list[bytes]:
    """Each example as bytes, label last."""
    flat = torch.cat([inputs.flatten(1), targets.to(torch.uint8).unsqueeze(1)], 1)
    return [bytes(row.tolist()) for row in flat]


def test_digits_are_as_declared():
    config = ImageData(name="digits")
    assert (config.num_examples, config.spec.num_test) == (1437, 360)
    check_against_spec(load_dataset(config, 0), config)


def test_digits_read_the_same_at_every_seed_when_nothing_is_held_out():
    one, two = (load_dataset(ImageData(name="digits"), seed) for seed in (0, 1))
    assert torch.equal(one.inputs, two.inputs)
    assert torch.equal(one.targets, two.targets)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.9, 1e-9])
def test_holdout_parts_the_training_split_and_leaves_the_test_split_alone(fraction):
    whole = load_dataset(ImageData(name="digits"), 0)
    config = ImageData(name="digits", validation="holdout", holdout_fraction=fraction)
    parted = load_dataset(config, 0)
    held = max(1, round(fraction * 1437))
    assert (len(parted.targets), len(parted.valid_targets)) == (1437 - held, held)
    assert len(parted.targets) == config.num_examples
    kept = rows(parted.inputs, parted.targets)
    out = rows(parted.valid_inputs, parted.valid_targets)
    assert sorted(kept + out) == sorted(rows(whole.inputs, whole.targets))


def test_holdout_is_drawn_by_the_seed_and_from_all_over_the_split():
    config = ImageData(name="digits", validation="holdout", holdout_fraction=0.3)
    one, again, other = (load_dataset.__wrapped__(config, seed) for seed in (0, 0, 1))
    assert torch.equal(one.valid_inputs, again.valid_inputs)
    assert not torch.equal(one.valid_inputs, other.valid_inputs)
    whole = rows(
        load_dataset(ImageData(name="digits"), 0).inputs,
        load_dataset(ImageData(name="digits"), 0).targets,
    )
    places = torch.tensor([whole.index(row) for row in rows(one.valid_inputs, one.valid_targets)])
    # 431 places drawn from 1437 have a mean of 718 with a deviation of 17; five of them.
    assert abs(places.double().mean().item() - 718) < 5 * 17


def test_reading_leaves_torchs_own_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    load_dataset.__wrapped__(ImageData(name="digits", validation="holdout"), 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_pixels_are_scaled_to_the_unit_interval_around_zero(dtype):
    data = load_dataset(ImageData(name="digits"), 0)
    scaled = data.scaled(torch.tensor([0, 4, 8, 16], dtype=torch.uint8), dtype)
    assert scaled.dtype == dtype
    assert scaled.tolist() == [-1.0, -0.5, 0.0, 1.0]


CONSTANTS = {"mean": [0.5, 0.25, 0.0], "std": [0.5, 0.25, 2.0]}


@pytest.mark.parametrize("lead", [(), (5,), (5, 2)])
def test_declared_constants_shift_and_scale_each_channel(lead):
    blank = torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.zeros(1)
    data = Dataset(*blank, *blank, brightest=255, normalise=Normalise.model_validate(CONSTANTS))
    pixels = torch.tensor([255, 0, 51], dtype=torch.uint8)[:, None, None].expand(*lead, 3, 4, 4)
    scaled = data.scaled(pixels, torch.float64)
    expected = torch.tensor([1.0, -1.0, 0.1], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(scaled, expected.expand(*lead, 3, 4, 4))


def test_declared_constants_reach_the_data_and_must_fit_the_channels():
    config = ImageData(name="digits", normalise={"mean": [0.5], "std": [0.5]})
    data = load_dataset(config, 0)
    assert data.normalise == config.normalise
    plain = load_dataset(ImageData(name="digits"), 0).scaled(data.inputs, torch.float64)
    torch.testing.assert_close(data.scaled(data.inputs, torch.float64), plain)
    with pytest.raises(ValidationError, match=r"has 3 numbers, and the images of mnist 1 channels"):
        ImageData(name="mnist", normalise=CONSTANTS)
    with pytest.raises(ValidationError, match="greater than 0"):
        ImageData(name="digits", normalise={"mean": [0.5], "std": [0.0]})


def test_unused_keys_stay_out_of_a_trial_s_identity():
    keys = {"name", "root", "validation", "holdout_fraction"}
    assert ImageData(name="digits").model_dump().keys() == keys


@every_file_set
def test_missing_root_is_told_with_the_folder_it_should_hold(name):
    folder = SPECS[name].folder
    with pytest.raises(ConfigError, match=rf"^data\.root: missing, .* holds {folder}"):
        ImageData(name=name).refuse_missing()
    with pytest.raises(ConfigError, match=rf"^data\.root: missing, and {name} needs it"):
        load_dataset(ImageData(name=name), 0)
    with pytest.raises(ConfigError, match=r"data\.root: missing; --download needs a folder"):
        download_dataset(ImageData(name=name))


@every_file_set
def test_root_without_the_files_is_told_with_the_place_looked_at(name, tmp_path):
    config = ImageData(name=name, root=str(tmp_path))
    place = tmp_path / SPECS[name].folder
    with pytest.raises(ConfigError, match=rf"does not hold {name}: {place} is not a folder"):
        config.refuse_missing()


@pytest.mark.parametrize("name", OF_TORCHVISION)
def test_folder_without_readable_files_is_told_so(name, tmp_path):
    (tmp_path / SPECS[name].folder).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"holds {name} but torchvision cannot read it: "):
        load_dataset(ImageData(name=name, root=str(tmp_path)), 0)


def test_digits_need_no_root():
    ImageData(name="digits").refuse_missing()
    download_dataset(ImageData(name="digits"))


@every_file_set
def test_real_files_are_as_declared(name, root):
    config = _on_disk(name, root)
    config.refuse_missing()
    check_against_spec(load_dataset.__wrapped__(config, 0), config)


@pytest.mark.slow
@every_file_set
def test_holdout_of_real_files_parts_the_training_split(name, root):
    config = _on_disk(name, root, validation="holdout", holdout_fraction=0.1)
    whole = load_dataset.__wrapped__(ImageData(name=name, root=root), 0)
    parted = load_dataset.__wrapped__(config, 0)
    check_against_spec(parted, config)
    together = torch.cat([parted.inputs, parted.valid_inputs]).flatten(1).double()
    direction = torch.randn(
        together.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    shadows = (together @ direction).sort().values
    expected = (whole.inputs.flatten(1).double() @ direction).sort().values
    torch.testing.assert_close(shadows, expected, rtol=0, atol=1e-6)


def _on_disk(name: str, root: str, **more: object) -> ImageData:
    config = ImageData(name=name, root=root, **more)
    if not config.place.is_dir():
        pytest.skip(f"{root} does not hold {name}")
    return config


def test_root_with_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data" / SPECS["mnist"].folder).mkdir(parents=True)
    ImageData(name="mnist", root="~/data").refuse_missing()
    assert Path("~/data").expanduser() == tmp_path / "data"
