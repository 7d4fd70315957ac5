"""A sweep from Python: the same checks, trials, statements and files as on the command line."""

import json
import re
import signal
import subprocess
import sys

import pandas as pd
import pytest
from waiting import CEILING_SECONDS

import dpsweep
from dpsweep.config.source import read_yaml
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError, StateError

SPEC = """{
    "name": "tiny",
    "base": {
        "data": {"name": "digits"},
        "model": {"name": "cnn_small", "width": 4},
        "privacy": {"epsilon": 4},
        "train": {"batch_size": 128, "epochs": %s},
        "optimizer": {"lr": 1.0},
        "method": {"name": "dp_sgd"},
    },
    "search": {"optimizer.lr": {"log_uniform": [0.3, 3]}},
    "sampler": {"name": "random"},
    "budget": {"trials": %s},
}"""


@pytest.fixture
def spec(sweep_file):
    """The tiny sweep as a mapping."""
    return read_yaml(sweep_file).tree


def test_importing_it_loads_nothing_of_it():
    told = subprocess.run(
        [sys.executable, "-c", "import dpsweep, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "ray", "optuna", "mlflow", "pandas", "numpy", "dpsweep.api"}
    assert not heavy & set(told.stdout.split())


def test_its_names_are_told_and_others_are_refused():
    assert {"launch", "open", "resume", "SweepConfig", "TrialConfig"} <= set(dir(dpsweep))
    assert dpsweep.DpSweepError is not None
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        dpsweep.lunch  # noqa: B018


def test_a_mistake_in_a_mapping_names_its_key(spec):
    spec["base"]["method"] = {"name": "dsik"}
    with pytest.raises(ConfigError, match=r"launch\(spec\).*dsik.*Did you mean 'disk'"):
        dpsweep.launch(spec)


def test_a_missing_file_is_an_error_of_ours():
    with pytest.raises(dpsweep.DpSweepError, match=r"nobody\.yaml"):
        dpsweep.launch("nobody.yaml")


def test_what_no_file_could_hold_is_refused(spec):
    spec["search"]["optimizer.lr"] = object()
    with pytest.raises(ConfigError, match=r"is of type object\. A sweep is made of mappings"):
        dpsweep.launch(spec)


def test_mapping_and_typed_config_are_the_sweep_of_the_file(sweep_file, spec):
    from dpsweep.api import _sweep

    from_file = load_sweep(sweep_file)
    assert _sweep(spec, []).config == from_file.config
    typed = _sweep(from_file.config, [])
    assert typed.config == from_file.config
    assert list(typed.corners) == list(from_file.corners)
    based_on_typed = _sweep({**spec, "base": from_file.reference_trial}, ["budget.trials=3"])
    assert based_on_typed.config.budget.trials == 3


def test_an_unknown_sweep_is_named(tmp_path):
    with pytest.raises(StateError, match="no sweep called 'nobody'"):
        dpsweep.open("nobody", state=tmp_path)


def test_what_a_sweep_found(make_sweep, tmp_path):
    name, state = make_sweep()
    before = files(tmp_path)
    sweep = dpsweep.open(name, state=state)
    trials = sweep.trials
    assert isinstance(trials, pd.DataFrame)
    assert list(trials.index) == [0, 1]
    assert list(trials["state"]) == ["complete", "complete"]
    for key in ("method.kappa", "optimizer.lr", "valid/accuracy", "delta", "noise_multiplier"):
        assert trials[key].notna().all()
    assert (trials["charged"] == 4).all()
    assert trials["epsilon"].between(3.9, 4).all()
    assert not trials["void"].any()

    winner = trials["valid/accuracy"].idxmax()
    assert sweep.best.optimizer.lr == trials["optimizer.lr"][winner]
    assert isinstance(sweep.best, dpsweep.TrialConfig)
    assert "(4.00, 3.4e-04)-differentially private" in sweep.privacy
    assert "The search of 2 independent trials" in sweep.privacy
    assert sweep.state == "finished"
    assert repr(sweep) == "<dpsweep sweep 'tiny': finished, 2 trials>"

    assert list(sweep.curves["number"]) == [0, 0, 1, 1]
    assert sweep.curves["valid/accuracy"].between(0, 1).all()
    assert "history" in sweep.figures
    assert sweep.figures["history"].to_dict()["data"]
    assert files(tmp_path) == before  # to look changes nothing

    (file,) = sweep.export(tmp_path / "best")
    assert file.suffix == ".yaml"
    with pytest.raises(ConfigError, match="fftkf is not in Opacus"):
        sweep.export(tmp_path / "other", format="opacus")


def test_a_sweep_without_a_result_says_so(tmp_path, sweep_file):
    from dpsweep.store.state_dir import StateFolder
    from dpsweep.store.study import Study

    state, sweep = StateFolder.at(str(tmp_path / "state")), load_sweep(sweep_file)
    folder = state.sweep(sweep.name)
    folder.create(sweep.file, sweep.base, None)
    Study.create(folder.storage_uri, sweep, folder.id)
    opened = dpsweep.open("tiny", state=state.root)
    assert opened.state == "stopped"
    assert opened.trials.empty
    assert opened.curves.empty
    assert "nothing has been spent" in opened.privacy
    for ask in (
        lambda: opened.best,
        lambda: opened.selection_bias,
        lambda: opened.export(tmp_path / "x"),
    ):
        with pytest.raises(StateError, match="no complete trial yet"):
            ask()
    with pytest.raises(StateError, match="is not finished"):
        opened.register("digits")


def files(folder):
    """All but SQLite's own passing ones."""
    return {p for p in folder.rglob("*") if not p.name.endswith(("-wal", "-shm"))}


@pytest.mark.slow
@pytest.mark.ray
def test_a_launch_from_a_thread_of_a_program(python, tmp_path):
    program = f"""
import json, threading, dpsweep
found = []
spec = {SPEC % (2, 2)}
thread = threading.Thread(target=lambda: found.append(dpsweep.launch(spec, quiet=True)))
thread.start(); thread.join()
import ray
assert not ray.is_initialized()
print(json.dumps([found[0].state, len(found[0].trials), found[0].best.optimizer.lr]))
"""
    told, _ = python(program).communicate(timeout=CEILING_SECONDS)
    state, count, lr = json.loads(told.splitlines()[-1])
    assert (state, count) == ("finished", 2), told
    assert 0.3 <= lr <= 3


@pytest.mark.slow
@pytest.mark.ray
def test_an_interrupt_stops_in_good_order_and_resume_goes_on(python, tmp_path):
    call = f"dpsweep.launch({SPEC % (40, 6)}, out='best.yaml')"
    process = python(f"import dpsweep; sweep = {call}; print('is', sweep.state)")
    told = ""
    while "[1/6]" not in told:
        line = process.stdout.readline()
        assert line, told
        told += line
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=CEILING_SECONDS)
    assert process.returncode == 0, told + rest
    assert "Stopped. Go on with: dpsweep.resume('tiny')" in rest
    assert "is stopped" in rest

    done, _ = python("import dpsweep; print(dpsweep.resume('tiny', quiet=True))").communicate()
    assert "finished, 6 trials" in done
    trials = dpsweep.open("tiny", state=tmp_path / ".dpsweep").trials
    assert (trials["state"] == "complete").all()
    assert re.match("# dpsweep export", (tmp_path / "best.yaml").read_text())
