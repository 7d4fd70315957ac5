"""Data of the user's own code: read as declared, or refused with key, example and remedy."""

import pytest
import torch
from pydantic import ValidationError

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, PrivateRowError
from dpsweep.core.own_code import import_function
from dpsweep.data import validate_data
from dpsweep.data.own import OwnData
from dpsweep.data.read import fingerprint_images, load_dataset, refuse_training_rows
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

CODE = """
import torch
from torch.utils.data import Dataset, TensorDataset

calls = []


class Rows(Dataset):
    def __init__(self, split, shift=0.0, root=None):
        calls.append((split, root))
        self.num, self.shift = (40 if split == "train" else 10), shift

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        if not 0 <= i < self.num:
            raise IndexError(i)
        x = torch.randn(3, generator=torch.Generator().manual_seed(i)) + self.shift
        return x, int(x.sum() > self.shift * 3)


def tensors(split, wrong=None):
    num = 40 if split == "train" else 10
    x, y = torch.zeros(num, 3), torch.arange(num) % 2
    if wrong == "nan":
        x[7, 1] = torch.nan
    if wrong == "label":
        y[7] = 2
    if wrong == "bytes":
        x = x.byte()
    if wrong == "long":
        x, y = torch.zeros(41, 3), torch.zeros(41)
    if wrong == "short":
        x = torch.zeros(num, 2)
    if wrong == "code":
        raise RuntimeError("patient 17 has no file")
    if wrong == "single":
        return [x[i] for i in range(num)]
    return TensorDataset(x, y)


def tokens(split, wrong=None):
    mask = [1, 0, 1] if wrong == "mask" else [1, 1, 0]
    last = 5 if wrong == "ids" else 4
    inputs = {"input_ids": torch.tensor([1, last, 0]), "attention_mask": torch.tensor(mask)}
    if wrong == "names":
        inputs = {"ids": inputs["input_ids"]}
    if wrong == "float":
        inputs["input_ids"] = torch.zeros(3)
    return [(inputs, [1.0, 0.0])] * (40 if split == "train" else 10)


def one_split(split):
    # as one who forgets `split`
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.arange(40) % 2)


def random(split):
    return [(torch.randn(3), 0)] * (40 if split == "train" else 10)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "own")
    (tmp_path / "my_rows.py").write_text(CODE)
    load_dataset.cache_clear()
    import_function.cache_clear()
    return str(tmp_path)


def section(folder, function="tensors", **more):
    return {
        **{"name": "own", "function": f"my_rows:{function}", "folder": folder, "shape": [3]},
        **{"task": {"name": "classification"}, "num_classes": 2, "num_train": 40, "num_test": 10},
        **more,
    }


def tokens_section(folder, **more):
    fields = {
        "input_ids": {"shape": [3], "num_ids": 5},
        "attention_mask": {"shape": [3], "mask": True},
    }
    named = {"shape": None, "fields": fields, "num_classes": None, "num_targets": 2}
    return section(folder, "tokens", task={"name": "multi_label"}, **{**named, **more})


def test_a_data_set_is_read_as_declared_and_nothing_of_it_is_kept(folder, tmp_path):
    config = validate_data(section(folder, "Rows", root=folder, arguments={"shift": 5.0}))
    assert isinstance(config, OwnData)
    config.refuse_missing()
    data = load_dataset(config, 0)
    assert data.inputs.shape == (40, 3)
    assert data.valid_inputs.shape == (10, 3)
    assert data.targets.dtype == torch.int64
    assert data.inputs.mean() > 4
    assert import_function("my_rows:calls", folder) == [("train", folder), ("test", folder)]
    assert config.places == {"root": tmp_path}  # never sent to a cluster
    assert not list((tmp_path / "cache").glob("*.pt"))


def test_a_function_that_returns_its_training_examples_as_test_split_is_refused(folder):
    config = validate_data(section(folder, "one_split", num_test=40))
    with pytest.raises(PrivateRowError, match=r"data\.function: more than half of the test split"):
        refuse_training_rows(config, load_dataset(config, 0))


def test_named_inputs_have_their_kinds_and_several_targets(folder):
    data = load_dataset(validate_data(tokens_section(folder)), 0)
    assert {k: (x.dtype, tuple(x.shape)) for k, x in data.inputs.items()} == {
        "input_ids": (torch.int32, (40, 3)),
        "attention_mask": (torch.uint8, (40, 3)),
    }
    assert data.targets.shape == (40, 2)


def test_a_tenth_can_be_held_out_and_the_fingerprint_is_of_what_was_read(folder):
    config = validate_data(section(folder, "Rows", num_test=None, validation="holdout"))
    data = load_dataset(config, 0)
    assert (len(data.targets), len(data.valid_targets)) == (36, 4)
    marks = [fingerprint_images(config, 0, b"k" * 32)]
    for _ in range(2):
        load_dataset.cache_clear()
        marks.append(fingerprint_images(config, 0, b"k" * 32))
    assert len(set(marks)) == 1
    other = validate_data(
        section(folder, "Rows", num_test=None, validation="holdout", arguments={"shift": 1.0})
    )
    assert fingerprint_images(other, 0, b"k" * 32) != marks[0]


def test_data_that_are_drawn_anew_have_another_fingerprint(folder):
    config = validate_data(section(folder, "random"))
    first = fingerprint_images(config, 0, b"k" * 32)
    load_dataset.cache_clear()
    assert fingerprint_images(config, 0, b"k" * 32) != first


WRONG = {
    "nan": r"split 'train', example 7: inputs holds numbers that are not finite",
    "label": r"example 7: 2 is outside the 2 classes.*data.num_classes",
    "bytes": r"example 0: inputs is torch.uint8, and floats are declared. Scale it by public",
    "long": r"data.num_train: declares 40, and data.function: .* has 41 examples in split 'train'",
    "short": r"example 0: inputs has the shape \[2\], and \[3\] is declared",
    "code": r"data.function: my_rows:tensors: RuntimeError: patient 17 has no file",
    "single": r"example 0: is a Tensor, and no pair \(inputs, target\)",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_as_declared_is_refused_with_its_place(folder, wrong):
    config = validate_data(section(folder, arguments={"wrong": wrong}))
    with pytest.raises(ConfigError, match=WRONG[wrong]) as found:
        load_dataset(config, 0)
    # what may quote an example stays on the node
    assert isinstance(found.value, PrivateRowError) == (wrong != "long")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("mask", r"attention_mask has a 1 behind a 0"),
        ("ids", r"input_ids is torch.int64 from 0 to 5, and whole numbers from 0 to 4"),
        ("names", r"inputs are \['ids'\], and data.fields declares \['input_ids'"),
        ("float", r"input_ids is torch.float32"),
    ],
)
def test_wrong_named_inputs_are_refused(folder, wrong, words):
    with pytest.raises(PrivateRowError, match=words):
        load_dataset(validate_data(tokens_section(folder, arguments={"wrong": wrong})), 0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"shape": None}, r"give one of data.shape and data.fields"),
        ({"fields": {"x": {"shape": [3]}}}, r"give one of data.shape and data.fields"),
        ({"num_test": None}, r"is missing. Declare the test split"),
        ({"num_classes": None}, r"or task.classes must be declared"),
        ({"function": "no function"}, r"should match pattern"),
        ({"task": {"name": "causal_lm"}, "num_classes": None}, r"data.name: generation"),
    ],
)
def test_a_section_that_declares_too_little_is_refused(folder, more, words):
    with pytest.raises(ValidationError, match=words):
        validate_data(section(folder, **more))


def test_a_function_or_a_root_that_is_not_there_is_refused_before_anything_runs(folder):
    with pytest.raises(ConfigError, match=r"^data.function: my_rows:no: AttributeError"):
        validate_data(section(folder, "no")).refuse_missing()
    with pytest.raises(ConfigError, match=r"^data.root: .*gone is not there"):
        validate_data(section(folder, root=f"{folder}/gone")).refuse_missing()


def test_a_trial_trains_on_it(folder, tmp_path):
    config = TrialConfig.model_validate(
        {
            "data": section(folder, "Rows"),
            "model": {"name": "linear"},
            "privacy": {"epsilon": 100, "delta": 1e-3},
            "train": {"batch_size": 20, "epochs": 30, "evaluate_every": 30, "device": "cpu"},
            "optimizer": {"total_step": 50},
            "method": {"name": "dp_sgd"},
        }
    )
    trial_dir = TrialDir(tmp_path / "trial")
    trial_dir.make_secret()
    result = train(config, trial_dir, lambda row: None)
    assert result.rows[-1]["valid/accuracy"] >= 0.8
