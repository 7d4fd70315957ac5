"""What can be trained is listed with true counts, and a folder's data section can be pasted."""

import json

import numpy as np
import pytest
import yaml
from PIL import Image

from dpsweep.cli.verbs.catalogue import data, models
from dpsweep.core.errors import ConfigError
from dpsweep.data.datasets import ImageData
from dpsweep.data.read import load_dataset
from dpsweep.models import MODELS


def test_models_are_listed_with_their_weights(capsys):
    models("cifar10", as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(MODELS)
    counts = {name: rows[name]["parameters"] for name in ("cnn5", "resnet18", "linear", "own")}
    assert counts == {"cnn5": 412_426, "resnet18": 11_173_962, "linear": 30_730, "own": None}
    models("mnist", as_json=False)
    assert "61,706" in capsys.readouterr().out


def test_model_that_does_not_fit_the_images_says_why(capsys):
    models("digits", as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["lenet5"]["parameters"] is None
    assert "at least 12 x 12 pixels, got 8 x 8" in rows["lenet5"]["why_not"]
    with pytest.raises(
        ConfigError, match=r"--data: unknown data set 'mnits'\. Did you mean 'mnist'"
    ):
        models("mnits", as_json=True)


def pasted(capsys, place) -> ImageData:
    data(place)
    return ImageData.model_validate(yaml.safe_load(capsys.readouterr().out)["data"])


def test_section_of_a_folder_loads_as_it_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    for split, name, size in (
        ("train", "a", (5, 4)),
        ("train", "b", (5, 4)),
        ("train", "b", (7, 9)),
        ("test", "a", (5, 4)),
    ):
        folder = tmp_path / "photos" / split / name
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{size[0]}.png")
    config = pasted(capsys, tmp_path / "photos")
    assert (config.shape, config.num_train, config.num_test) == ((3, 5, 4), 3, 1)
    assert config.resize
    assert load_dataset(config, 0).inputs.shape == (3, 3, 5, 4)


def test_section_of_a_file_loads_as_it_is_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    images = np.zeros((6, 5, 4), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", x_train=images, y_train=np.arange(6) % 3)
    config = pasted(capsys, tmp_path / "d.npz")
    assert (config.shape, config.num_classes, config.validation) == ((1, 5, 4), 3, "holdout")
    assert load_dataset(config, 0).inputs.shape == (5, 1, 5, 4)


def test_place_that_is_neither_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"no such folder\. Give a folder that holds"):
        data(tmp_path / "nowhere")
