"""Whatever stands in a file, it is read or refused in one message, without a traceback or a trace.

The files are the shipped ones, changed at random by tests/config/malformed.py; the same each time,
50 by default and 200 with the slow tests. `HYPOTHESIS_SEED=random` in the environment draws others.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from waiting import CEILING_SECONDS

from dpsweep.cli import main

_SPEC = importlib.util.spec_from_file_location(
    "malformed", Path(__file__).with_name("malformed.py")
)
malformed = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(malformed)

SAME = os.environ.get("HYPOTHESIS_SEED") != "random"
FEW, MANY = 50, int(os.environ.get("DPSWEEP_MALFORMED", "200"))
QUIET = settings(
    deadline=None,
    database=None,
    derandomize=SAME,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """The command line, in process, on a file of these bytes: exit code and what it said."""

    def check(raw, verb="check"):
        (tmp_path / "x.yaml").write_bytes(raw)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["dpsweep", verb, "x.yaml"])
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as e:
            code = e.code or 0
        assert sorted(p.name for p in tmp_path.iterdir()) == ["x.yaml"], "something was written"
        return code, capfd.readouterr().err

    return check


def told_well(code, said):
    """What a message must be like; any other exception has already failed the test."""
    assert code in (0, 2), said
    assert "Traceback" not in said
    if code == 2:
        mistakes = [line for line in said.splitlines() if not line.startswith("warning: ")]
        assert mistakes[0].startswith("error: "), said
        assert "x.yaml" in mistakes[0] or "data.root" in mistakes[0], said
        assert len(said) < 20_000, "one message, not the file again"


@settings(QUIET, max_examples=FEW)
@given(raw=malformed.files())
def test_a_malformed_file_is_one_message_and_no_traceback(run, raw):
    told_well(*run(raw))


@pytest.mark.slow
@settings(QUIET, max_examples=MANY)
@given(raw=malformed.files())
def test_many_malformed_files_are_one_message_each(run, raw):
    told_well(*run(raw))


@settings(QUIET, max_examples=10)
@given(raw=malformed.files(), verb=st.sampled_from(["plan", "launch", "train", "resume", "audit"]))
def test_verbs_that_do_something_refuse_it_before_they_begin(run, raw, verb):
    broken = raw + b"\nnope: [\n"
    code, said = run(broken, verb)
    assert code == 2
    assert said.startswith("error: x.yaml:"), said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"name: [1\n", r"x\.yaml:2: not valid YAML"),
        (b"seed: !!python/object/apply:os.system ['touch x']\n", r"x\.yaml:1: .*Delete the tag"),
        (b"seed: !!python/object/new:os.system {a: 1}\n", r"x\.yaml:1: .*Delete the tag"),
        (b"seed: !!python/name:os.system\n", r"x\.yaml:1: .*python"),
        (b"seed: !!binary '***'\n", r"x\.yaml:1: "),
        (b"seed: !!int x\n", r"x\.yaml:1: "),
        (b"seed: !!float {a: 1}\n", r"x\.yaml:1: "),
        (b"seed: !!timestamp 2026-99-99\n", r"x\.yaml:1: "),
        (b"seed: 2026-99-99\n", r"x\.yaml:1: "),
        (b"seed: " + b"9" * 5000 + b"\n", r"x\.yaml:1: "),
        (b"seed: 0x" + b"f" * 9000 + b"\n", r"x\.yaml:1: "),
        (b"seed: 1:60:60" + b":59" * 3000 + b"\n", r"x\.yaml:1: "),
        (b"data: {name: digits}\0\n", r"x\.yaml:1: not valid YAML"),
        (b"data: {name: digits}\n\xff\xfe\n", r"x\.yaml: cannot be read as text"),
        ("data: {name: digits}\n".encode("utf-16"), r"x\.yaml: cannot be read as text"),
        (b"", r"x\.yaml:1: is empty\. A config holds keys and values"),
        (b"- 1\n", r"x\.yaml:1: expected a mapping of keys to values, got a list"),
        (b"a: {b: &a [*a]}\n", r"x\.yaml:1: "),
        (b"a: " + b"[" * 3000 + b"]" * 3000 + b"\n", r"x\.yaml:1: nested too deeply"),
        (b"a: " + b"{b: " * 3000 + b"1" + b"}" * 3000 + b"\n", r"x\.yaml:1: nested too deeply"),
        (b"? {a: 1}\n: 2\n", r"x\.yaml:1: a key must be a word"),
        (b"data: 1\ndata: 2\n", r"x\.yaml:2: data: given a second time"),
        (
            b"a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + b"".join(
                b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 10))
                for c in range(ord("b"), ord("k"))
            ),
            r"x\.yaml:1: has over 100000 values",
        ),
        (b"# " + b"x" * 5_000_000 + b"\n", r"x\.yaml: .*bytes"),
    ],
    ids=range(24),
)
def test_yaml_is_read_safely(run, text, words):
    code, said = run(text)
    assert code == 2
    assert re.search(words, said), said
    assert len(said) < 2000


CYCLES = [
    ("optimizer.lr: {derive: 'optimizer.lr * 2'}", "search.optimizer.lr"),
    (
        "optimizer.lr: {derive: 'train.batch_size / 100'}\n"
        "  train.batch_size: {derive: 'optimizer.lr * 100'}",
        "search.",
    ),
    ("method.kappa: {derive: '9 ** 9 ** 9 ** 9'}", "search.method.kappa"),
    ("method.kappa: {derive: '" + "(" * 500 + "1" + ")" * 500 + "'}", "search.method.kappa"),
    ("method.kappa: {derive: '().__class__'}", "search.method.kappa"),
]


@pytest.mark.parametrize(("search", "key"), CYCLES, ids=range(len(CYCLES)))
def test_formulas_that_chase_their_tail_or_dig_are_named_by_their_key(run, sweep_file, search, key):
    text = sweep_file.read_text()
    before, _, rest = text.partition("search:\n")
    after = rest[rest.index("sampler:") :]
    sweep_file.unlink()
    code, said = run(f"{before}search:\n  {search}\n{after}".encode())
    assert code == 2
    assert re.search(rf"x\.yaml:\d+: {re.escape(key)}", said), said


@pytest.mark.slow
@pytest.mark.parametrize("raw", [b"\xff\xfe\0", b"a: [", b"!!python/object:os.system {}"])
def test_a_real_process_says_the_same(tmp_path, raw):
    (tmp_path / "x.yaml").write_bytes(raw)
    done = subprocess.run(
        [sys.executable, "-m", "dpsweep", "check", "x.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CEILING_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: x.yaml:")
    assert len(done.stderr.splitlines()) == 1
