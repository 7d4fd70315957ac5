"""Images of one's own, in folders and in a file: read as declared, or refused with both numbers."""

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from dpsweep.core.errors import ConfigError
from dpsweep.data import folders, npz
from dpsweep.data.datasets import ImageData
from dpsweep.data.inspection import inspect_data
from dpsweep.data.read import fingerprint_images, list_class_names, load_dataset

KEY = b"k" * 32

SHAPE = [3, 6, 4]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    load_dataset.cache_clear()


def image(seed: int, *, channels: int = 3, height: int = 6, width: int = 4) -> np.ndarray:
    size = (height, width, 3) if channels == 3 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def save(array: np.ndarray, *place: object) -> None:
    path = place[0].joinpath(*map(str, place[1:]))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


@pytest.fixture
def root(tmp_path):
    """Three classes, four training images and two others each."""
    for c, name in enumerate(["cat", "dog", "eel"]):
        for i in range(4):
            save(image(10 * c + i), tmp_path / "photos", "train", name, "deep", f"{i}.png")
        for i in range(2):
            save(image(100 + 10 * c + i), tmp_path / "photos", "val", name, f"{i}.png")
    return tmp_path / "photos"


def folder(root: object, **more: object) -> ImageData:
    keys = {"shape": SHAPE, "num_classes": 3, "num_train": 12, "num_test": 6, **more}
    return ImageData(name="folder", root=str(root), **keys)


def test_classes_have_the_names_of_their_folders_or_those_declared_or_numbers(root):
    assert list_class_names(folder(root)) == ("cat", "dog", "eel")
    task = {"name": "classification", "classes": ["a", "b", "c"]}
    assert list_class_names(folder(root, task=task)) == ("a", "b", "c")
    assert list_class_names(folder(root / "not here")) == ("0", "1", "2")


def test_folders_are_read_pixel_by_pixel_with_classes_in_the_order_of_their_names(root):
    folder(root).refuse_missing()
    data = load_dataset(folder(root), 0)
    assert data.targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.valid_targets.tolist() == [0, 0, 1, 1, 2, 2]
    for at, seed in ((0, 0), (5, 11), (11, 23)):
        assert np.array_equal(data.inputs[at].permute(1, 2, 0).numpy(), image(seed))
    assert np.array_equal(data.valid_inputs[3].permute(1, 2, 0).numpy(), image(111))
    assert data.brightest == 255


def test_folder_without_train_is_one_split_of_which_a_part_is_held_out(root):
    config = folder(root / "train", num_test=None, validation="holdout", holdout_fraction=0.25)
    data = load_dataset(config, 0)
    assert (len(data.targets), len(data.valid_targets)) == (9, 3) == (config.num_examples, 3)


def test_copy_of_the_node_is_read_anew_when_a_file_or_the_shape_changes(root):
    before = fingerprint_images(folder(root), 0, KEY)
    save(image(77), root, "train", "cat", "deep", "0.png")
    load_dataset.cache_clear()
    assert fingerprint_images(folder(root), 0, KEY) != before
    small = load_dataset(folder(root, shape=[3, 3, 2], resize=True), 0)
    assert small.inputs.shape == (12, 3, 3, 2)


def test_tiny_imagenet_s_list_of_labels_is_read(root):
    val = root / "val"
    for c in ("cat", "dog", "eel"):
        for i in range(2):
            (val / "images").mkdir(exist_ok=True)
            (val / c / f"{i}.png").rename(val / "images" / f"{c}{i}.png")
        (val / c).rmdir()
    lines = [f"{c}{i}.png\t{c}\t0\t0\t9\t9" for i in range(2) for c in ("eel", "cat", "dog")]
    (val / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    data = load_dataset(folder(root), 0)
    assert data.valid_targets.tolist() == [2, 0, 1, 2, 0, 1]
    assert np.array_equal(data.valid_inputs[0].permute(1, 2, 0).numpy(), image(120))


def test_grey_images_fit_among_coloured_ones_and_not_the_other_way_round(root):
    save(image(5, channels=1), root, "train", "dog", "deep", "1.png")
    data = load_dataset(folder(root), 0)
    assert (data.inputs[5] == data.inputs[5, :1]).all()
    load_dataset.cache_clear()
    message = r"data\.shape: 1 x 6 x 4 .* 11 of 12 images have another: .*0\.png \(3 x 6 x 4\)"
    with pytest.raises(ConfigError, match=message):
        load_dataset(folder(root, shape=[1, 6, 4]), 0)


def test_images_of_other_sizes_say_both_and_three_names(root):
    for i in range(4):
        save(image(5, height=9), root, "train", "dog", "deep", f"{i}.png")
    message = (
        r"data\.shape: 3 x 6 x 4 \(channels x height x width\), and 4 of 12 images have another: "
        r".*dog/deep/0\.png \(3 x 9 x 4\), .*1\.png .*, .*2\.png .*, \.\.\.\. Correct it, or set "
        r"data\.resize: true"
    )
    with pytest.raises(ConfigError, match=message):
        load_dataset(folder(root), 0)
    assert load_dataset(folder(root, resize=True), 0).inputs.shape == (12, 3, 6, 4)


def test_corrupted_images_are_counted_and_three_are_named(root):
    for i in range(3):
        (root / "train" / "eel" / "deep" / f"{i}.png").write_bytes(b"no image at all")
    whole = (root / "train" / "cat" / "deep" / "0.png").read_bytes()
    (root / "train" / "cat" / "deep" / "0.png").write_bytes(whole[: len(whole) // 2])
    message = r"4 of 12 images cannot be read: .*cat.*0\.png, .*eel.*0\.png, .*eel.*1\.png, \.\.\."
    with pytest.raises(ConfigError, match=message):
        load_dataset(folder(root), 0)


def test_folder_with_one_class_is_refused(tmp_path):
    save(image(0), tmp_path, "train", "cat", "0.png")
    with pytest.raises(ConfigError, match=r"train holds one class, 'cat'\. Each class is a folder"):
        folders.list_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no folders"):
        folders.list_folder(tmp_path / "train" / "cat")


def test_labels_outside_the_classes_of_training_are_told(root):
    save(image(0), root, "val", "yak", "0.png")
    with pytest.raises(ConfigError, match=r"val has labels outside the classes .*: 1 .* 'yak'"):
        load_dataset(folder(root), 0)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"num_train": 13}, r"data\.num_train: 13, and .* holds 12 such images\. Write what is th"),
        ({"num_test": 5}, r"data\.num_test: 5, and .* holds 6 such images"),
        ({"num_classes": 4}, r"data\.num_classes: 4, and .* holds 3 classes"),
    ],
)
def test_folder_that_holds_something_else_than_declared_says_both(root, declared, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(folder(root, **declared), 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_train": None}, r"is missing, and folder needs it\. .* dpsweep data here"),
        ({"num_test": None}, r"is missing, and folder needs it"),
        (
            {"shape": [6, 4]},
            r"must be \[channels, height, width\] with 1 or 3 channels, got \[6, 4",
        ),
        ({"shape": [2, 6, 4]}, r"with 1 or 3 channels, got \[2, 6, 4\]"),
        ({"num_classes": 1}, "greater than 1"),
    ],
)
def test_declaration_that_lacks_something_is_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        folder("here", **keys)


@pytest.mark.parametrize("key", ["num_train", "num_test", "num_classes"])
def test_known_data_sets_take_no_declaration(key):
    with pytest.raises(ValidationError, match=r"is for data of your own, and mnist has its own"):
        ImageData(name="mnist", **{key: 10})
    with pytest.raises(ValidationError, match=r"is for folder, and the images of mnist have one"):
        ImageData(name="mnist", resize=True)


def arrays(tmp_path, names: str = "x_train y_train x_test y_test", **changed: np.ndarray) -> str:
    """Writes a file of 8 and 4 images of 3 classes, and gives its path."""
    rng = np.random.default_rng(0)
    parts = [
        rng.integers(0, 256, (8, 6, 4, 3), dtype=np.uint8),
        np.arange(8) % 3,
        rng.integers(0, 256, (4, 6, 4, 3), dtype=np.uint8),
        np.arange(4)[:, None] % 3,
    ]
    path = tmp_path / "data.npz"
    np.savez(path, **{**dict(zip(names.split(), parts, strict=True)), **changed})
    return str(path)


def of_file(path: str, **more: object) -> ImageData:
    keys = {"shape": SHAPE, "num_classes": 3, "num_train": 8, "num_test": 4, **more}
    return ImageData(name="npz", root=path, **keys)


@pytest.mark.parametrize(
    "names",
    [
        "x_train y_train x_test y_test",
        "train_images train_labels val_images val_labels",
        "train_images train_labels test_images test_labels",
    ],
)
def test_arrays_are_read_under_both_packages_names(tmp_path, names):
    path = arrays(tmp_path, names)
    of_file(path).refuse_missing()
    data = load_dataset(of_file(path), 0)
    with np.load(path) as file:
        images = torch.from_numpy(file[names.split()[0]])
    assert torch.equal(data.inputs.permute(0, 2, 3, 1), images)
    assert data.targets.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert data.valid_targets.tolist() == [0, 1, 2, 0]
    assert npz.read_headers(tmp_path / "data.npz")[names.split()[0]].shape == (8, 6, 4, 3)


@pytest.mark.parametrize("size", [(8, 6, 4), (8, 1, 6, 4), (8, 6, 4, 1)])
def test_grey_arrays_are_read_in_every_layout(tmp_path, size):
    images = np.arange(8 * 24, dtype=np.uint8).reshape(size)
    path = arrays(tmp_path, x_train=images)
    config = of_file(path, shape=[1, 6, 4], num_test=None, validation="holdout")
    data = load_dataset(config, 0)
    assert data.inputs.shape == (7, 1, 6, 4)
    assert sorted(data.inputs[:, 0, 0, 0].tolist() + data.valid_inputs[:, 0, 0, 0].tolist()) == [
        24 * i for i in range(8)
    ]


@pytest.mark.parametrize(
    ("changed", "declared", "message"),
    [
        ({"x_train": np.zeros((8, 6, 4, 3))}, {}, r"x_train holds float64, and images are bytes"),
        ({}, {"shape": [3, 5, 4]}, r"3 x 5 x 4 .* and the images of x_train are 6 x 4 x 3"),
        ({}, {"num_train": 9}, r"data\.num_train: 9, and x_train holds 8 images"),
        ({}, {"num_test": 5}, r"data\.num_test: 5, and x_test holds 4 images"),
        (
            {"y_train": np.array([0, 1, 2, 3, 7, 7, -1, 0])},
            {},
            r"4 labels outside the 3 classes.*: -1, 3, 7\.",
        ),
        (
            {"y_train": np.zeros(8)},
            {},
            r"y_train holds float64 of shape \(8,\), and labels are one",
        ),
        ({"y_test": np.zeros((4, 2), int)}, {}, r"y_test holds int64 of shape \(4, 2\)"),
        ({"y_train": np.arange(7) % 3}, {}, r"holds \(8, 3, 6, 4\) images and 7 labels"),
    ],
)
def test_arrays_that_are_not_as_declared_are_refused(tmp_path, changed, declared, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(of_file(arrays(tmp_path, **changed), **declared), 0)


def test_other_files_are_told(tmp_path):
    path = arrays(tmp_path, "a b c d")
    with pytest.raises(ConfigError, match=r"holds a, b, c, d, and what is read is x_train"):
        load_dataset(of_file(path), 0)
    (tmp_path / "data.npz").write_text("hello")
    with pytest.raises(ConfigError, match=r"data\.npz: is not an \.npz file of NumPy's"):
        load_dataset(of_file(path), 0)
    with pytest.raises(ConfigError, match=r"^data\.root: .*nowhere is not a file"):
        of_file(str(tmp_path / "nowhere")).refuse_missing()


def test_pickled_arrays_are_never_loaded(tmp_path):
    path = arrays(tmp_path, y_train=np.array([object()] * 8, dtype=object))
    with pytest.raises(ConfigError, match=r"^data\.root: .*array 'y_train' holds Python objects"):
        load_dataset(of_file(path), 0)


def test_images_of_many_sizes_are_declared_as_a_square_of_the_middle_one(tmp_path):
    """The most frequent of many sizes is one of chance, such as 37 x 28."""
    for i, (height, width) in enumerate([(37, 28), (37, 28), (40, 35), (44, 33), (39, 50)]):
        save(image(i, height=height, width=width), tmp_path, "photos", "ab"[i % 2], f"{i}.png")
    section = inspect_data(tmp_path / "photos").section
    assert section["shape"] == [3, 32, 32]
    assert section["resize"]
