"""The scripts of benchmarks/ print what they measured, as a table or as JSON."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import command
from rounding import measure_excess
from sigma import sigma
from step import step
from typer.testing import CliRunner

from dpsweep.core.errors import ConfigError

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
STEP = ["--model", "cnn_small", "--data", "digits", "--batch", "16"]


def bench(script, *args: str) -> str:
    done = CliRunner().invoke(command(script), args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


ONE_BY_ONE = """
import runpy, sys
folder, *names = sys.argv[1:]
sys.path[0] = folder  # as Python does for a script that it is given by its path
for name in names:
    sys.argv = [f"{folder}/{name}.py", "--help"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, name
"""


def test_a_script_runs_by_its_path_from_anywhere(tmp_path, monkeypatch):
    """All in one process, since each imports torch for seconds."""
    monkeypatch.chdir(tmp_path)
    done = shell("-c", ONE_BY_ONE, str(SCRIPTS), "step", "sigma", "sweep")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--json") == 3


def test_a_scripts_mistake_is_one_line():
    done = shell(str(SCRIPTS / "sigma.py"), "--batch", "many")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --batch 'many' must be whole numbers")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "script"),
    [
        (["step", "--method", "disk"], "step.py"),
        (["sigma", "--batch", "250", "--json"], "sigma.py"),
        (["sweep", "--trials=5"], "sweep.py"),
        ([], "step.py"),
        (["--help"], "step.py"),
    ],
)
def test_the_verb_of_old_names_its_script(typed, script):
    done = shell("-m", "dpsweep", "bench", *typed)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.rstrip().endswith(f"python benchmarks/{script}")


@pytest.mark.parametrize("place", sorted(SCRIPTS.glob("*.py")), ids=lambda place: place.stem)
def test_what_a_script_imports_from_dpsweep_is_there(place):
    """Imported here as well as in mypy, as some scripts take hours and no test runs them."""
    for node in ast.walk(ast.parse(place.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpsweep"):
            exec(compile(ast.Module([node], []), str(place), "exec"), {})


def test_steps_are_told_with_their_ratio_to_the_first():
    args = ["--method", "dp_sgd,fftkf", "--against", "sgd,vmap", "--repeats", "2", "--json"]
    told = json.loads(bench(step, *STEP, *args))
    assert [row["runner"] for row in told["rows"]] == ["sgd", "dp_sgd@vmap", "dp_sgd", "fftkf"]
    first, *_, last = told["rows"]
    assert first["ratio"] == 1
    assert last["ratio"] == pytest.approx(last["milliseconds"] / first["milliseconds"])
    assert first["parts"] is None
    assert sum(last["parts"].values()) == pytest.approx(1)
    assert last["parts"]["filters"] > 0
    assert {"device", "threads", "torch", "opacus"} <= told["machine"].keys()


def test_methods_of_several_numbers_of_points_run_beside_one_another():
    names = ["dp_sgd", "disk", "innerouter:points=3", "innerouter:points=3@fixed"]
    args = ["--method", ",".join(names), "--against", "", "--repeats", "1", "--json"]
    told = json.loads(bench(step, *STEP, *args))
    assert [row["runner"] for row in told["rows"]] == names


def test_the_table_names_model_data_and_batch():
    shown = bench(step, *STEP, "--against", "sgd", "--repeats", "1")
    assert "One step of cnn_small, digits, B = 16" in shown
    assert "of sgd" in shown


def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        bench(step, *STEP, "--device", "cuda")


def test_a_model_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"step.py:1: model.*cnn6.*cnn5"):
        bench(step, "--model", "cnn6")


def test_a_method_that_does_not_fit_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"step.py:1: model: .*plain Linear.*CirculantLinear"):
        bench(step, *STEP, "--method", "spectral_dp", "--against", "")


def test_keys_of_model_and_method_can_be_set():
    args = ["--method", "spectral_dp", "--against", "", "--repeats", "1", "--json"]
    keys = ["model.width=5", "model.block=5", "method.keep=0.4"]
    told = json.loads(bench(step, *STEP, *args, *(x for key in keys for x in ("--set", key))))
    assert told["race"]["settings"] == keys


def test_sigmas_are_near_those_of_opacus():
    (row,) = json.loads(bench(sigma, "--batch", "4000", "--json"))
    assert row["sigma"] == pytest.approx(row["prv"], rel=0.01)
    assert row["sigma"] <= row["rdp"] * 1.001


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch", "0"], r"--batch '0' must be whole numbers from 1 to 50000"),
        (["--batch", "many"], r"--batch 'many' must be whole numbers"),
        (["--data", "cifar"], r"--data.*cifar.*cifar10"),
    ],
)
def test_a_mistake_is_told(args, message):
    with pytest.raises(ConfigError, match=message):
        bench(sigma, *args)


@pytest.mark.ray
@pytest.mark.slow
def test_what_a_search_adds_is_timed_on_a_cluster_of_its_own():
    done = shell(str(SCRIPTS / "sweep.py"), "--trials", "2", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert told["trials"] == 2
    assert told["tracked"] is True
    assert 0 < told["seconds_in_trials"] < told["seconds"]


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("float64", 1e-12)])
def test_rounding_moves_the_others_part_of_a_sum_by_little(dtype, most):
    example, portions = measure_excess("linear", "bookkeeping", dtype, num=200)
    assert 0 < example < most
    assert 0 < portions < most
