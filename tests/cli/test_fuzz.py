"""Whatever is typed, each verb ends with an exit code and one message, never with a traceback.

Verbs, their options and their arguments are read from the command line itself, and values of
config keys from the JSON schema, so that what is added later is tried as well.
"""

import os
import sys

import pytest
import typer.main
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dpsweep.cli import app, main
from dpsweep.config.sweep import SweepConfig
from dpsweep.config.trial import TrialConfig

QUIET = settings(
    deadline=None,
    database=None,
    derandomize=os.environ.get("HYPOTHESIS_SEED") != "random",
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
_SERVES = {"ui", "up", "down", "bench"}  # they start or end processes, or are gone
_VERBS = {k: v for k, v in typer.main.get_command(app).commands.items() if k not in _SERVES}
_WORDS = (
    "none.yaml broken.yaml trial.yaml . /dev/null /proc/none/x nobody a/b ../x -1 0 nan 1e400 ε "
    "a=1 = a.b= http://127.0.0.1:9 sqlite:////proc/x.db mysql://x 127.0.0.1:9 { [1 ~x"
)
_JUNK = st.one_of(
    st.sampled_from([*_WORDS.split(), "", " ", "é" * 90, "a" * 5000]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6),
)


@st.composite
def command_lines(draw):
    """A verb with some of its options, each with a value that is likely wrong."""
    verb = draw(st.sampled_from(sorted(_VERBS)))
    words = [verb]
    for parameter in _VERBS[verb].params:
        if parameter.param_type_name == "argument":
            words += [draw(_JUNK)] if draw(st.integers(0, 9)) else []
        elif parameter.name != "fetch" and not draw(st.integers(0, 5)):
            words.append(draw(st.sampled_from(parameter.opts)))
            words += [] if parameter.is_flag else [draw(_JUNK)]
    return words


def _values(schema, root, depth=4):
    """Values that a schema allows, nearly allows and does not allow."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    options = [_JUNK, st.sampled_from([None, True, -1, 0, 1, 2.5, 10**12, [], {}, ["x"], {"x": 1}])]
    if members := schema.get("anyOf", []) + schema.get("oneOf", []):
        options += [_values(member, root, depth) for member in members]
    if "enum" in schema:
        options.append(st.sampled_from(schema["enum"]))
    if "const" in schema:
        options.append(st.just(schema["const"]))
    if schema.get("type") == "array" and depth:
        options.append(st.lists(_values(schema.get("items", {}), root, depth - 1), max_size=2))
    if (keys := schema.get("properties")) and depth:
        inner = {key: _values(below, root, depth - 1) for key, below in keys.items()}
        options.append(st.fixed_dictionaries({}, optional=inner))
    return st.one_of(*reversed(options))


def _whole_files(model):
    """Files that have most of their sections, each drawn from its schema."""
    root = model.model_json_schema()
    return st.fixed_dictionaries(
        {}, optional={k: _values(v, root) for k, v in root["properties"].items()}
    )


@pytest.fixture
def typed(tmp_path, monkeypatch, capfd):
    """Runs the command line in process: exit code and what it said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text("name: [1\n")
    (tmp_path / "trial.yaml").write_text("data: {name: digits}\nprivacy: {epsilon: -1}\n")
    (tmp_path / "base.yaml").write_text(
        "data: {name: digits}\nmodel: {name: linear}\nprivacy: {noise_multiplier: 1}\n"
        "train: {batch_size: 100, epochs: 1}\nmethod: {name: dp_sgd}\n"
    )

    def run(words):
        monkeypatch.setattr(sys, "argv", ["dpsweep", *words])
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as e:
            code = e.code or 0
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


def _check(code, said):
    assert code in (0, 1, 2, 75), said
    assert "Traceback" not in said
    assert code == 0 or said.strip(), "it says why"


@settings(QUIET, max_examples=60)
@given(words=command_lines())
def test_any_command_line_ends_with_a_message_and_no_traceback(typed, words):
    _check(*typed(words))


@pytest.mark.slow
@settings(QUIET, max_examples=400)
@given(words=command_lines())
def test_many_command_lines_end_with_a_message_each(typed, words):
    _check(*typed(words))


@settings(QUIET, max_examples=40)
@given(tree=st.one_of(_whole_files(SweepConfig), _whole_files(TrialConfig)))
def test_any_file_of_the_schema_is_valid_or_told_in_messages(typed, tmp_path, tree):
    import yaml

    text = yaml.safe_dump({"base": "base.yaml", "name": "x", **tree}, allow_unicode=True)
    (tmp_path / "drawn.yaml").write_text(text, encoding="utf-8", errors="replace")
    code, said = typed(["check", "drawn.yaml"])
    _check(code, said)
    assert len(said) < 60_000, "messages, not the file again"
