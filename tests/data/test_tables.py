"""Tables: every value is as declared, or an error with its line; nothing is computed from rows."""

import io
import json
import math
import re
from contextlib import nullcontext
from textwrap import dedent

import numpy as np
import pytest
import torch
import yaml

from dpsweep.config.source import parse_yaml, with_overrides
from dpsweep.config.trial import load_trial
from dpsweep.core.errors import ConfigError, PrivateRowError
from dpsweep.data import validate_data
from dpsweep.data.read import fingerprint_images, load_dataset, load_shared_features
from dpsweep.data.rows import inspect_columns
from dpsweep.training.check import check_trial
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

KEY = b"k" * 32
HEADER = ["id", "age", "sex", "sick", "score"]
ROWS = [
    [1, 30, "f", 0, 2.5],
    [2, 90, "m", 1, 7.5],
    [3, 60, "f", 1, 5.0],
    [4, 0, "m", 0, 0.0],
]
COLUMNS = {"age": {"range": [0, 120]}, "sex": {"categories": ["f", "m"]}}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    load_dataset.cache_clear()


def write(path, rows=ROWS, header=HEADER):
    columns = dict(zip(header, zip(*rows, strict=False), strict=False))
    match path.suffix:
        case ".csv":
            lines = [",".join(map(str, row)) for row in (header, *rows)]
            path.write_text("\n".join(lines) + "\n")
        case ".tsv":
            lines = ["\t".join(map(str, row)) for row in (header, *rows)]
            path.write_text("\n".join(lines) + "\n")
        case ".jsonl":
            path.write_text(
                "".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows)
            )
        case ".npz":
            np.savez(path, **{k: np.array(v) for k, v in columns.items()})
        case ".parquet":
            pyarrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.table(columns), path)
    return path


def section(path, **more):
    base = {
        "name": "table",
        "file": str(path),
        "target": "sick",
        "columns": COLUMNS,
        "task": {"name": "classification"},
        "num_classes": 2,
        "num_train": len(ROWS),
        "validation": "holdout",
        "holdout_fraction": 0.25,
    }
    return {k: v for k, v in (base | more).items() if v is not None}


def load(path, **more):
    return load_dataset(validate_data(section(path, **more)), 0)


def all_rows(data):
    """Inputs and targets of both parts together, in the order of the targets and inputs."""
    inputs = torch.cat([data.inputs, data.valid_inputs])
    targets = torch.cat([data.targets, data.valid_targets])
    return {(*map(float, x), *np.ravel(y).tolist()) for x, y in zip(inputs, targets, strict=True)}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "npz", "parquet"])
def test_each_format_reads_the_same(tmp_path, suffix):
    data = load(write(tmp_path / f"rows.{suffix}"))
    assert data.inputs.dtype == torch.float32
    assert all_rows(data) == {
        (-0.5, 1, 0, 0),
        (0.5, 0, 1, 1),
        (0.0, 1, 0, 1),
        (-1.0, 0, 1, 0),
    }
    assert torch.equal(data.scaled(data.inputs, torch.float64), data.inputs.double())


def test_test_file_is_another_file(tmp_path):
    train, test = write(tmp_path / "a.csv"), write(tmp_path / "b.csv", ROWS[:2])
    data = load(
        train, test_file=str(test), num_test=2, validation="test_split", holdout_fraction=None
    )
    assert data.inputs[:, 0].tolist() == [-0.5, 0.5, 0.0, -1.0]
    assert data.valid_inputs[:, 0].tolist() == [-0.5, 0.5]


def test_targets_are_as_the_task_takes_them(tmp_path):
    path = write(tmp_path / "rows.csv")
    regression = {"name": "regression", "range": [0, 10]}
    data = load(path, target="score", task=regression, num_classes=None)
    assert data.targets.shape == (3, 1)
    assert load(path, target=["sick"], task={"name": "multi_label"}, num_classes=None).targets.shape
    named = {"name": "classification", "classes": ["m", "f"]}
    swapped = load(
        path, target="sex", task=named, num_classes=None, columns={"age": {"range": [0, 120]}}
    )
    assert all_rows(swapped) == {(-0.5, 1), (0.5, 0), (0.0, 1), (-1.0, 0)}


def test_missing_values_and_outliers_are_read_as_declared(tmp_path):
    path = write(tmp_path / "rows.csv", [[1, "", "f", 0, 1], [2, 150, "", 1, 1]])
    columns = {
        "age": {"range": [0, 120], "missing": 60, "clip": True},
        "sex": {"categories": ["f", "m"], "missing": "m"},
    }
    data = load(path, columns=columns, num_train=2)
    assert all_rows(data) == {(0.0, 1, 0, 0), (1.0, 0, 1, 1)}


def replaced(row, column, value):
    rows = [list(each) for each in ROWS]
    rows[row][HEADER.index(column)] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (replaced(1, "age", "old"), r"rows\.csv, line 3: column 'age': 'old' is no number"),
        (replaced(1, "age", "25 365"), r"'25 365' is no number\. Correct it: 25365 has no separ"),
        (replaced(2, "age", "NaN"), r"line 4: column 'age': is empty or NaN.*missing: VALUE"),
        (replaced(2, "age", ""), r"line 4: column 'age': is empty or NaN"),
        (replaced(2, "age", "inf"), r"line 4: column 'age': 'inf' is no finite number"),
        (
            replaced(0, "age", 121),
            r"line 2: column 'age': 121 is outside the declared range",
        ),
        (replaced(3, "sex", "x"), r"line 5: column 'sex': 'x' is none of the declared categories"),
        (replaced(3, "sick", 2), r"line 5: column 'sick': '2' is outside the 2 classes"),
        (replaced(3, "sick", -1), r"line 5: column 'sick': '-1' is outside the 2 classes"),
        (replaced(3, "sick", 0.5), r"line 5: column 'sick': '0.5' is outside the 2 classes"),
        (
            replaced(3, "sick", ""),
            r"line 5: column 'sick': is empty.* Correct it, or delete the row",
        ),
        (
            replaced(3, "sick", "neg"),
            r"line 5: column 'sick': 'neg' is no number.*data\.num_classes.*data\.task: {name:",
        ),
        ([*ROWS[:2], [3, 60, "f", 1], ROWS[3]], r"line 4: has 4 cells, and the header has 5"),
        (ROWS[:3], r"^data\.num_train: declares 4, and .*rows\.csv holds 3 rows"),
        ([], r"has a header and no row"),
    ],
)
def test_bad_row_is_named_by_its_line(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path / "rows.csv", rows))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rows.csv: is empty"),
        ("id,age,sex\n1,2,f\n", "has no column 'sick'. Known: age, id, sex"),
        ("id,agee,sex,sick\n1,2,f,0\n", "has no column 'age'. Did you mean 'agee'"),
        ('id,age,sex,sick\n1,"2,f,0\n', "line 2: the row that begins here is broken"),
        (  # the open quote takes in all lines to the end
            'id,age,sex,sick\n1,2,f,0\n1,"2,f,0\n' + "1,2,f,0\n" * 90,
            r"rows\.csv, line 3: the row that begins here is broken.* Close its quotes",
        ),
        ('id,age,"sex,sick\n1,2,f,0\n', r"rows\.csv, line 1: the row that begins here is broken"),
        ('id,age,sex,sick\n1,2,"f\nf",0\n1,2,"\nf"\n', "line 4: has 3 cells, and the header has 4"),
    ],
)
def test_broken_file_is_said(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)


def npz_bytes(**columns):
    whole = io.BytesIO()
    np.savez(whole, **columns)
    return whole.getvalue()


def npy_bytes():
    whole = io.BytesIO()
    np.save(whole, np.zeros(4))
    return whole.getvalue()


WHOLE = npz_bytes(age=np.arange(4000.0), sex=np.array(["f"] * 4000), sick=np.zeros(4000))
DAMAGED = WHOLE.replace(np.float64(3000).tobytes(), b"12345678")  # which the checksum shows
OBJECTS = npz_bytes(age=np.array([1, "a"], dtype=object), sex=np.zeros(2), sick=np.zeros(2))
KINDS = [
    ("jsonl", b"{}\n[1]\n", r"rows\.jsonl, line 2: is no JSON object\. Correct it: each line is"),
    ("jsonl", b'{}\n{"broken\n', r"rows\.jsonl, line 2: is no JSON: .*\. Correct it: each line is"),
    ("jsonl", b'{"a": "\xe9"}\n', r"rows\.jsonl, line 1: is not UTF-8\. Save the file as UTF-8"),
    ("npz", b"nothing of the kind", r"rows\.npz: is not an \.npz file .*numpy\.savez"),
    ("npz", WHOLE[: len(WHOLE) // 2], r"rows\.npz: is not an .* or is cut short\. Copy it afresh"),
    ("npz", npy_bytes(), r"rows\.npz: is not an \.npz file"),
    ("npz", DAMAGED, r"rows\.npz: is broken: .*age.*\. Copy or write it afresh"),
    (
        "npz",
        OBJECTS,
        r"rows\.npz: array 'age' holds Python objects, .* Write it as numbers or text",
    ),
    ("csv", b"age,sex,sick\n1,f,0\n\xff\xfe,f,0\n", r"rows\.csv, line 3: is not UTF-8\. Save the"),
    ("tsv", b"\xffage\tsex\tsick\n", r"rows\.tsv, line 1: is not UTF-8"),
    ("parquet", b"nothing of the kind", r"cannot be read as parquet.*\. Copy or write it afresh"),
    ("xls", b"", r"ends in none of \.csv, \.tsv.*\. Convert it"),
]


@pytest.mark.parametrize(("suffix", "content", "message"), KINDS, ids=lambda v: None)
@pytest.mark.parametrize("read", [load, inspect_columns])
def test_file_of_another_kind_is_said(tmp_path, read, suffix, content, message):
    """`check` and `init` read it alike."""
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read(path)
    assert "allow_pickle" not in str(caught.value), "which runs the code in the file"


def test_parquet_that_is_not_utf8_is_said(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    text = pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(
        pyarrow.table({"age": [1], "sex": text, "sick": [0]}), tmp_path / "rows.parquet"
    )
    with pytest.raises(PrivateRowError, match=r"rows\.parquet: holds text that is not UTF-8"):
        load(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": None}, "columns"),
        ({"columns": {"age": {}}}, r"takes one of range: \[LOW, HIGH\] and categories"),
        ({"columns": {"age": {"range": [5, 5]}}}, "LOW below HIGH"),
        ({"columns": {"sex": {"categories": ["f", "f"]}}}, "names one twice"),
        ({"columns": COLUMNS | {"sick": {"range": [0, 1]}}}, "is the target, and no input"),
        ({"validation": "test_split"}, "Declare the test split"),
        ({"test_file": "x.csv"}, "is of validation: test_split"),
        ({"num_classes": None}, "or task.classes must be declared"),
        ({"task": {"name": "regression", "range": [0, 1]}}, "is of classification"),
        ({"target": ["sick", "score"]}, "classification takes one column"),
        ({"task": {"name": "classification", "class_weights": [1.0]}}, "for each of 2 classes"),
    ],
)
def test_what_must_be_declared_is_said(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        validate_data(section(tmp_path / "rows.csv", **change))


def test_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("data.file: ")):
        validate_data(section(tmp_path / "absent.csv")).refuse_missing()


def test_a_rows_inputs_depend_on_that_row_alone(tmp_path):
    """No constant is computed from the rows: one row more extreme moves no other."""
    whole = {"validation": "test_split", "num_test": 4, "holdout_fraction": None}
    before = write(tmp_path / "a.csv")
    after = write(tmp_path / "b.csv", replaced(1, "age", 120))
    one, two = (load(path, test_file=str(path), **whole) for path in (before, after))
    same = [0, 2, 3]
    assert torch.equal(one.inputs[same], two.inputs[same])
    assert not torch.equal(one.inputs[1], two.inputs[1])


@pytest.mark.parametrize(
    ("places", "step", "refused"),
    [
        (range(80), 1, True),
        (range(79, -1, -2), 1, True),  # sorted otherwise, and a part
        (range(60, 120), 1, False),  # a third
        (range(30), 1, False),  # so few may be equal by chance
        (range(80), 10, False),  # and where many are alike
    ],
)
def test_training_rows_as_test_split_are_refused(tmp_path, places, step, refused):
    """Reports would measure private rows without noise, and the statement call them public."""
    every = [[i, i // step, "f", i % 2, i % 11] for i in range(120)]
    path = write(tmp_path / "a.csv", every[:80])
    test = write(tmp_path / "b.csv", [every[i] for i in places])
    split = {"validation": "test_split", "num_train": 80, "num_test": len(places)}
    data = section(path, test_file=str(test), holdout_fraction=None, **split)
    source = parse_yaml(yaml.safe_dump({**trial(path), "data": data}), "x.yaml")
    expected = pytest.raises(PrivateRowError, match=r"data\.test_file: more than half of the test")
    with expected if refused else nullcontext():
        check_trial(load_trial(source), source)


def test_rows_are_read_once_a_node_and_again_when_the_file_changes(tmp_path):
    path = write(tmp_path / "rows.csv")
    load(path)
    copies = list((tmp_path / "cache").glob("*.pt"))
    assert len(copies) == 1
    load_dataset.cache_clear()
    load(path, holdout_fraction=0.5)
    assert list((tmp_path / "cache").glob("*.pt")) == copies
    marks = {fingerprint_images(validate_data(section(path)), 0, KEY)}
    write(path, replaced(1, "age", 99))
    load_dataset.cache_clear()
    marks.add(fingerprint_images(validate_data(section(path)), 0, KEY))
    assert len(marks) == 2


def trial(path, **more):
    return {
        "data": section(path, **more),
        "model": {"name": "linear"},
        "privacy": {"epsilon": 2.0},
        "train": {"batch_size": 64, "epochs": 10, "evaluate_every": 10, "dtype": "float64"},
        "method": {"name": "dp_sgd"},
    }


@pytest.mark.parametrize(
    ("change", "metric", "least"),
    [
        ({}, "valid/accuracy", 0.8),
        (
            {
                "target": "score",
                "task": {"name": "regression", "range": [0, 10]},
                "num_classes": None,
            },
            "valid/r2",
            0.5,
        ),
    ],
    ids=["classification", "regression"],
)
def test_trial_learns_a_table_with_its_default_step(tmp_path, change, metric, least):
    rng = np.random.default_rng(0)
    age = rng.integers(0, 121, 800)
    rows = [
        [i, a, "fm"[i % 2], int(a > 60), round(float(np.clip(a / 12 + n, 0, 10)), 3)]
        for i, (a, n) in enumerate(zip(age, rng.normal(0, 0.5, 800), strict=True))
    ]
    path = write(tmp_path / "rows.csv", rows)
    source = parse_yaml(yaml.safe_dump(trial(path, num_train=800, **change)), "x.yaml")
    config = load_trial(source)
    check_trial(config, source)
    trial_dir = TrialDir(tmp_path / "trial")
    with trial_dir.lock():
        trial_dir.make_secret()
        row = train(config, trial_dir, lambda row: None).rows[-1]
    assert row[metric] > least
    assert math.isfinite(row["valid/loss"])


def test_models_of_images_refuse_a_table(tmp_path):
    tree = trial(write(tmp_path / "rows.csv"), num_train=4)
    tree |= {"model": {"name": "cnn_small"}, "train": {"batch_size": 2, "epochs": 1}}
    source = parse_yaml(yaml.safe_dump(tree), "x.yaml")
    with pytest.raises(ConfigError, match=r"takes images, and the data have 3 numbers"):
        check_trial(load_trial(source), source)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("my. sex: m,score", r"x\.yaml:11: data\.target: .* has no column 'sick'"),
        ("age,sick", r"x\.yaml:10: data\.columns\.my\. sex: m: .* has no column 'my\. sex: m'"),
        ("my. sex: m,sick", r"x\.yaml:10: data\.columns\.my\. sex: m: .*, line 2: .* 'x' is none"),
    ],
)
def test_a_wrong_column_is_said_with_the_line_of_its_key(tmp_path, header, message):
    text = """
    privacy: {epsilon: 3, delta: 1e-2, clip_norm: 1.0}
    model: {name: linear}
    method: {name: dp_sgd}
    optimizer: {name: sgd, lr: 1}
    train: {batch_size: 2, epochs: 1}
    data:
      name: table
      columns:
        "my. sex: m": {categories: [f, m]}
      target: sick
      task: {name: classification}
      num_classes: 2
      num_train: 4
      validation: holdout
    """
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n" + "x,x\n" * 4)
    source = with_overrides(parse_yaml(dedent(text), "x.yaml"), [f"data.file={path}"])
    with pytest.raises(ConfigError, match="^" + message):
        check_trial(load_trial(source), source)


def test_flips_refuse_a_table(tmp_path):
    tree = trial(write(tmp_path / "rows.csv"), num_train=4)
    tree["train"] = {"batch_size": 2, "epochs": 1, "augment": {"flips": True}}
    source = parse_yaml(yaml.safe_dump(tree), "x.yaml")
    with pytest.raises(ConfigError, match="flips and shifts images, and table has none"):
        check_trial(load_trial(source), source)


def test_what_is_made_of_the_data_follows_every_file_of_theirs(tmp_path):
    file, test = write(tmp_path / "a.csv"), write(tmp_path / "b.csv")
    config = validate_data(
        section(
            file, test_file=str(test), num_test=4, validation="test_split", holdout_fraction=0.1
        )
    )
    made = []

    def make():
        made.append(1)
        return (torch.zeros(1),)

    for _ in range(2):
        load_shared_features(config, 0, "features", make)
    assert len(made) == 1
    write(test, ROWS[::-1])
    load_shared_features(config, 0, "features", make)
    assert len(made) == 2


@pytest.fixture
def saved(tmp_path):
    """A folder with two splits, as the package datasets writes it."""
    datasets = pytest.importorskip("datasets", reason="extra datasets")
    columns = dict(zip(HEADER, zip(*ROWS, strict=True), strict=True))
    train = datasets.Dataset.from_dict(columns)
    both = datasets.DatasetDict({"train": train, "validation": train.select([0, 1])})
    both.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def folder_section(saved, **more):
    keys = {"format": "huggingface", "split": "train", "test_split": "validation", "num_test": 2}
    return section(saved, validation="test_split", **{**keys, **more})


def test_a_data_set_of_the_package_datasets_is_read_as_a_file_of_rows_is(tmp_path, saved):
    ours = load_dataset(validate_data(folder_section(saved)), 0)
    files = {"test_file": str(write(tmp_path / "b.csv", ROWS[:2])), "num_test": 2}
    theirs = section(write(tmp_path / "a.csv"), validation="test_split", **files)
    same = load_dataset(validate_data(theirs), 0)
    for name in ("inputs", "targets", "valid_inputs", "valid_targets"):
        assert torch.equal(getattr(ours, name), getattr(same, name))
    config = validate_data(folder_section(saved))
    assert config.places == {"file": saved}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"split": "trian"}, r"has no split 'trian'. Did you mean 'train'"),
        ({"num_train": 5}, r"^data.num_train: declares 5, and .* holds 4 rows"),
        ({"target": "sik"}, r"has no column 'sik'. Did you mean 'sick'"),
        ({"columns": {"age": {"range": [0, 80]}}}, r"row 2: column 'age': 90 is outside"),
    ],
)
def test_a_data_set_of_the_package_datasets_is_refused_as_a_file_is(saved, more, words):
    with pytest.raises(ConfigError, match=words):
        load_dataset(validate_data(folder_section(saved, **more)), 0)


def test_a_folder_of_another_kind_is_refused(tmp_path):
    pytest.importorskip("datasets", reason="extra datasets")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"is no data set of the package datasets.*save_to_disk"):
        load_dataset(validate_data(folder_section(tmp_path / "other")), 0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"split": None}, "is missing, such as train"),
        ({"format": None}, "is of format: huggingface"),
        ({"test_split": None}, "is missing. Declare the test split"),
    ],
)
def test_splits_are_declared_with_the_format_alone(tmp_path, more, words):
    with pytest.raises(ValueError, match=words):
        validate_data(folder_section(tmp_path, **more))


def test_a_folder_or_package_that_is_missing_is_said(tmp_path, monkeypatch):
    config = validate_data(folder_section(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"data.file: .*gone is not a folder"):
        config.refuse_missing()
    monkeypatch.setattr("dpsweep.data.tables.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dpsweep\[datasets\]'"):
        validate_data(folder_section(tmp_path)).refuse_missing()
