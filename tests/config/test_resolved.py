"""A sweep is read, merged and validated once; what comes after reads the result."""

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dpsweep
from dpsweep.cli import app
from dpsweep.config import keys
from dpsweep.config.keys import flatten
from dpsweep.config.plan import plan_privacy
from dpsweep.config.sweep import load_sweep
from dpsweep.execution.disk_use import estimate_disk_bytes
from dpsweep.search.charge import get_privacy_cap
from dpsweep.training.check import check_sweep

PACKAGE = Path(dpsweep.__file__).parent


@pytest.fixture
def calls():
    """How often each function of the config package is entered from outside of its module."""
    counted = Counter()

    def count(frame, event, _):
        code = frame.f_code
        if event == "call" and "dpsweep/config" in code.co_filename:
            counted[code.co_name] += 1

    sys.setprofile(count)
    yield counted
    sys.setprofile(None)


def test_a_sweep_is_resolved_once_and_read_by_all_that_follows(sweep_file, calls):
    sweep = load_sweep(sweep_file)
    corners = len(sweep.corners)
    assert calls["read_yaml"] == 1, "its base stands in it"
    assert calls["load_trial"] <= corners + 1, "each corner, and one with its privacy as written"
    calls.clear()
    check_sweep(sweep)
    estimate_disk_bytes(sweep, 2)
    get_privacy_cap(sweep)
    assert (sweep.reference_trial, len(sweep.methods)) == (sweep.corners[0], 1)
    assert calls["read_yaml"] == calls["resolve_sweep"] == calls["walk"] == 0
    assert calls["load_trial"] == 32, "points inside the space alone"


@pytest.mark.parametrize(
    "verb",
    [
        "check tiny.yaml",
        "launch tiny.yaml --unique -o .",
        "launch tiny.yaml --name other -o .",
        "resume tiny.yaml",
        "plan tiny.yaml --set accounting=nobody",
    ],
)
def test_a_verb_reads_and_resolves_its_file_once(sweep_file, calls, monkeypatch, verb):
    """Those that would start a cluster end before that: `.` is no file for the best config."""
    monkeypatch.chdir(sweep_file.parent)
    CliRunner().invoke(app, verb.split())
    assert calls["read_yaml"] == 1
    assert calls["_resolve"] <= 1


def test_every_corner_has_its_privacy_plan(sweep_file):
    sweep = load_sweep(sweep_file)
    assert sweep.plans is sweep.plans
    assert [*sweep.plans] == [plan_privacy(trial) for trial in sweep.corners]
    assert all(plan.epsilon <= 4 and plan.run.steps > 0 for plan in sweep.plans)


def test_what_is_resolved_cannot_be_changed(sweep_file):
    sweep = load_sweep(sweep_file)
    with pytest.raises(AttributeError):
        sweep.config = None


def test_a_dotted_key_is_written_once():
    constants = {v for k, v in vars(keys).items() if k.isupper()}
    # Methods and privacy lie below the config; a method's default space is data.
    roots = ("config", "search", "store", "execution", "training", "results", "app", "cli")
    written = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for root in roots
        for path in (PACKAGE / root).rglob("*.py")
        if path.name != "keys.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in constants
    ]
    assert not written


def test_flattening_keeps_or_drops_what_has_no_value():
    tree = {"a": {"b": {"c": [1], "d": None}}, "e": {}, "f": 0}
    assert flatten(tree) == {"a.b.c": [1], "a.b.d": None, "e": {}, "f": 0}
    assert flatten(tree, empty=False) == {"a.b.c": [1], "f": 0}
