"""What tired users type: one message, exit code 2, and nothing left behind."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dpsweep import __version__
from dpsweep.cli import app
from dpsweep.core.errors import DpSweepError

ROOT = Path(__file__).parents[2]
FASHION = ROOT / "sweeps/fashion_mnist_fftkf.yaml"


def mistake(tmp_path, monkeypatch, *args):
    """The message of a command that must fail before it writes anything."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert isinstance(result.exception, DpSweepError), result.output
    assert sorted(tmp_path.rglob("*")) == before
    return str(result.exception)


COMMANDS = [
    (["launch", "none.yaml"], r"none.yaml: no such file"),
    (["launch", FASHION], r"data.root: '.*data' does not hold fashion_mnist"),
    (["launch", FASHION, "--set", "data.root=~/none"], "add --download to fetch it there"),
    (["launch", "tiny.yaml", "--set", "train.batch_size=2000"], "exceeds the 1437 private"),
    (["launch", "tiny.yaml", "--state", "tiny.yaml/x"], "tiny.yaml is not a folder"),
    (["launch", "tiny.yaml", "-o", "tiny.yaml/best.yaml"], "cannot be written: Not a directory"),
    (["launch", "tiny.yaml", "-o", "tiny.yaml"], "is not one of our exports"),
    (["launch", "tiny.yaml", "--tracking-uri", "http://127.0.0.1:9"], "nothing answers there"),
    (["launch", "tiny.yaml", "--tracking-uri", "./mlruns"], "a plain path is no tracking server"),
    (["launch", "tiny.yaml", "--address", "127.0.0.1:9"], "--address 127.0.0.1:9: nothing answers"),
    (["launch", "tiny.yaml", "--address", "somewhere"], "expected auto or HOST:PORT"),
    (["launch", "tiny.yaml", "--address", "ray://127.0.0.1:9"], "ray://127.0.0.1:9: nothing"),
    (
        ["launch", "tiny.yaml", "--address", "http://h:8265"],
        "dpsweep submit FILE --to http://h:8265",
    ),
    (["resume", "nobody"], "no sweep called 'nobody' in"),
    (["status", "nobody"], "no sweep called 'nobody' in"),
    (["stop", "nobody"], "no sweep called 'nobody' in"),
    (["best", "nobody"], "no sweep called 'nobody' in"),
    (["export", "nobody", "-o", "out"], "no sweep called 'nobody' in"),
    (["ui"], "no results are tracked there yet"),
    (["train", "tiny.yaml"], "is a sweep, not a trial. Run it with: dpsweep launch"),
    (["check", "tiny.yaml", "--set", "nonsense"], "expected KEY=VALUE"),
    (["space", "dsik"], "space: unknown method 'dsik'. Did you mean 'disk'?"),
    (["audit", "dsik"], "audit: unknown method 'dsik'. Did you mean 'disk'?"),
    (
        ["audit", str(ROOT / "configs/digits_shared.yaml")],
        "digits_shared.yaml:4: privacy.scope: sweep shares epsilon among the trials of a sweep",
    ),
    (
        ["audit", "disk", "--set", "method.kappa=0"],
        "method disk:1: method.kappa|--set method.kappa",
    ),
    (["schema", "swep"], "unknown kind of file 'swep'. Did you mean 'sweep'?"),
]


@pytest.mark.parametrize(("args", "message"), COMMANDS, ids=lambda v: None)
def test_a_mistake_is_one_message_and_leaves_nothing(
    tmp_path, monkeypatch, sweep_file, args, message
):

    assert re.search(message, mistake(tmp_path, monkeypatch, *args))


def test_an_exit_code_of_2_and_no_traceback(sweep_file, verb):
    out = verb("check", sweep_file, "--set", "method.gamma=0", code=2)
    assert out.startswith("error: ")
    assert "Traceback" not in out


def test_a_delta_that_means_nothing_is_warned_of(sweep_file):
    result = CliRunner().invoke(app, ["check", str(sweep_file), "--set", "privacy.delta=0.01"])
    assert result.exit_code == 0
    words = "warning: privacy.delta: 0.01 is not below 1 / num_examples = 0.0007"
    assert words in result.output


def test_help_is_instant_and_training_alone_loads_no_service(sweep_file, tmp_path):
    listing = (
        "import sys; from dpsweep.cli import app; print(*sys.modules)",
        "import sys; import dpsweep.cli.verbs.trial; print(*sys.modules)",
    )
    loaded = [
        set(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout.split()
        )
        for code in listing
    ]
    assert not loaded[0] & {"torch", "ray", "optuna", "mlflow", "numpy"}
    assert not loaded[1] & {"ray", "optuna", "mlflow"}


def test_train_keeps_runs_apart_and_finished_ones_whole(tmp_path, monkeypatch):
    config = ROOT / "configs/digits_cnn.yaml"
    short = ["--set", "train.epochs=1", "-q"]
    refused = mistake(tmp_path, monkeypatch, "train", config, *short, "-o", "/dev/null/x")
    assert "cannot be written" in refused
    for _ in range(2):
        result = CliRunner().invoke(app, ["train", str(config), *short])
        assert result.exit_code == 0, result.exception
    runs = tmp_path / "runs"
    first, second = (runs / name / "weights.pt" for name in ("digits_cnn", "digits_cnn-2"))
    assert first.read_bytes() != second.read_bytes(), "each run draws noise of its own"
    words = (runs / "digits_cnn/privacy.txt").read_text()
    assert "-differentially private" in words
    assert "This covers this run alone" in words
    refused = mistake(tmp_path, monkeypatch, "train", config, *short, "-o", "runs/digits_cnn")
    assert "runs/digits_cnn: holds another run" in refused
    assert not list(runs.glob("*/secret"))


def test_a_run_that_lost_its_secret_is_not_begun_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs/digits_cnn.yaml")
    args = ["train", config, "--set", "train.epochs=1", "-q", "-o", "run"]
    assert CliRunner().invoke(app, args).exit_code == 0
    (tmp_path / "run/privacy.txt").unlink()  # as if it had been killed just before
    lost = mistake(tmp_path, monkeypatch, *args)
    assert "reports were made here with a secret that is gone" in lost


@pytest.mark.parametrize("verb", ["check", "plan", "launch"])
def test_data_that_are_not_as_declared_stop_a_sweep_before_it_has_a_name(
    verb, tmp_path, sweep_file, monkeypatch
):
    images, labels = np.zeros((1500, 8, 8), np.uint8), np.arange(1500) % 10
    root = tmp_path / "x.npz"
    np.savez(root, x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path.with_name("cache")))
    declared = "{name: npz, shape: [1, 8, 8], num_classes: 10, num_train: 1400, num_test: 9"
    settings = ["--set", f"data={declared}, root: {root}}}"]
    told = mistake(tmp_path, monkeypatch, verb, sweep_file, *settings)
    assert "--set data.num_train: 1400, and x_train holds 1500 images" in told


def test_the_version_is_told_and_nothing_else_is_done():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"dpsweep {__version__}\n")


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["submit", "tiny.yaml", "--to", "http://127.0.0.1:9"], "submit"),
        (["logs", "tiny"], "logs"),
        (["launch", "tiny.yaml", "--address", "ray://h:10001"], "--address ray://h:10001"),
    ],
)
def test_a_plain_install_names_the_extra_that_reaches_clusters(
    tmp_path, monkeypatch, sweep_file, args, what
):
    monkeypatch.setitem(sys.modules, "pathspec", None)  # as where it is not installed
    told = mistake(tmp_path, monkeypatch, *args)
    assert told.startswith(f"{what}: reaches a Ray cluster, and packages that this needs")
    assert "(pathspec). Install them with: pip install 'dpsweep[cluster]'" in told


def test_the_first_line_of_a_launch_needs_neither_torch_nor_ray(sweep_file, tmp_path):
    """It stands on the screen before the seconds that those take to be imported."""
    code = (
        "import sys; sys.argv = ['dpsweep', 'launch', 'tiny.yaml', '--state', 'state']\n"
        "import builtins; real = builtins.__import__\n"
        "def spy(name, *rest, **more):\n"
        "    if name.split('.')[0] in ('torch', 'ray', 'mlflow'):\n"
        "        print('IMPORTS', name, flush=True)\n"
        "        sys.exit()  # what is told later is not looked at\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = spy\n"
        "from dpsweep.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    first, second = done.stdout.splitlines()
    assert first == "tiny: 2 trials, ε 4 a trial. Checking the model, the data and the services ..."
    assert second.startswith("IMPORTS")
