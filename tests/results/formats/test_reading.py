"""A script reads the very data that the trial was trained on, and scales them the same."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from dpsweep.config.source import read_yaml
from dpsweep.config.trial import load_trial, resolve_trial_source
from dpsweep.core.errors import ConfigError
from dpsweep.data.read import load_dataset
from dpsweep.results.formats.reading import reading_code

OWN = "num_classes: 2, num_train: 6, num_test: 4"


def trial(*settings):
    return load_trial(resolve_trial_source(read_yaml("configs/digits_cnn.yaml"), list(settings)))


def check_same(config):
    reading = reading_code(config)
    space = {"torch": torch, "SHAPE": config.data.spec.shape}
    exec("from pathlib import Path\n" + "\n".join(reading.imports) + reading.code, space)
    images, labels, valid_images, valid_labels = space["read"](config.data.root)
    data = load_dataset(config.data, config.seed)
    assert torch.equal(images, data.inputs)
    assert torch.equal(labels, data.targets)
    assert torch.equal(valid_images, data.valid_inputs)
    assert torch.equal(valid_labels, data.valid_targets)
    ours = data.scaled(data.valid_inputs, torch.float32)
    assert torch.equal(space["scaled"](valid_images), ours)


@pytest.fixture
def images(tmp_path):
    """Six grey images to train on and four to test with, of two classes; one of another size."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 255, (8, 8), np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "photos"


def test_digits():
    check_same(trial())


def test_a_held_out_part():
    check_same(trial("data.validation=holdout", "seed=5"))


def test_a_folder(images):
    own = f"name: folder, root: {images}, shape: [1, 8, 8], {OWN}"
    check_same(trial(f"data={{{own}}}", "train.batch_size=2"))


def test_a_folder_of_mixed_sizes(images):
    Image.new("RGB", (11, 9), "red").save(images / "train" / "cat" / "0.png")
    own = f"name: folder, root: {images}, shape: [3, 8, 8], resize: true, {OWN}"
    check_same(trial(f"data={{{own}}}", "train.batch_size=2"))


def test_constants_of_ones_own(images):
    own = f"name: folder, root: {images}, shape: [1, 8, 8], {OWN}"
    check_same(
        trial(f"data={{{own}, normalise: {{mean: [0.1], std: [0.3]}}}}", "train.batch_size=2")
    )


def test_a_numpy_file(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "own.npz",
        train_images=rng.integers(0, 255, (6, 8, 8, 3), np.uint8),
        train_labels=np.array([[0], [1]] * 3),
        test_images=rng.integers(0, 255, (4, 8, 8, 3), np.uint8),
        test_labels=np.array([[0], [1]] * 2),
    )
    own = f"name: npz, root: {tmp_path / 'own.npz'}, shape: [3, 8, 8], {OWN}"
    check_same(trial(f"data={{{own}}}", "train.batch_size=2"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_torchvisions_files(name):
    root = os.environ.get("DPSWEEP_TEST_DATA")
    if root is None:
        pytest.skip("DPSWEEP_TEST_DATA names no folder")
    check_same(trial(f"data={{name: {name}, root: {root}}}"))


def test_a_layout_of_its_own_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match=r"tiny_imagenet has a layout of its own.*--register"):
        reading_code(trial("data={name: tiny_imagenet, root: data}"))
