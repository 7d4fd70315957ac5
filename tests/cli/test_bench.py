"""The bench verbs print what they measured, as a table or as JSON."""

import json

import pytest
from typer.testing import CliRunner

from dpsweep.cli import app
from dpsweep.core.errors import ConfigError

STEP = ["bench", "step", "--model", "cnn_small", "--data", "digits", "--batch", "16"]


def bench(*args: str) -> str:
    done = CliRunner().invoke(app, args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_steps_are_told_with_their_ratio_to_the_first():
    args = ["--method", "dp_sgd,fftkf", "--against", "sgd,vmap", "--repeats", "2", "--json"]
    told = json.loads(bench(*STEP, *args))
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
    told = json.loads(bench(*STEP, *args))
    assert [row["runner"] for row in told["rows"]] == names


def test_the_table_names_model_data_and_batch():
    shown = bench(*STEP, "--against", "sgd", "--repeats", "1")
    assert "One step of cnn_small, digits, B = 16" in shown
    assert "of sgd" in shown


def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        bench(*STEP, "--device", "cuda")


def test_a_model_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"bench step:1: model.*cnn6.*cnn5"):
        bench("bench", "step", "--model", "cnn6")


def test_a_method_that_does_not_fit_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"bench step:1: model: .*plain Linear.*CirculantLinear"):
        bench(*STEP, "--method", "spectral_dp", "--against", "")


def test_keys_of_model_and_method_can_be_set():
    args = ["--method", "spectral_dp", "--against", "", "--repeats", "1", "--json"]
    keys = ["model.width=5", "model.block=5", "method.keep=0.4"]
    told = json.loads(bench(*STEP, *args, *(x for key in keys for x in ("--set", key))))
    assert told["race"]["settings"] == keys


def test_sigmas_are_near_those_of_opacus():
    (row,) = json.loads(bench("bench", "sigma", "--batch", "4000", "--json"))
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
        bench("bench", "sigma", *args)
