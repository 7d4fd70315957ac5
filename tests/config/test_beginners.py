"""What a beginner gets wrong is told by its own name, with the way out, in one line."""

import re

import pytest

from dpsweep.cli.verbs.trial import check
from dpsweep.config.source import parse_yaml
from dpsweep.config.sweep import is_sweep, load_sweep
from dpsweep.config.trial import load_trial
from dpsweep.core.errors import ConfigError


def told(sweep_file, *settings):
    with pytest.raises(ConfigError) as caught:
        load_sweep(sweep_file, list(settings))
    return str(caught.value)


@pytest.fixture
def no_search(sweep_file):
    """The small sweep without its `search`."""
    before, _, rest = sweep_file.read_text().partition("search:\n")
    sweep_file.write_text(before + rest[rest.index("sampler:") :])
    return sweep_file


def test_sweep_without_search_is_told_of_search_alone(no_search):
    with pytest.raises(ConfigError) as caught:
        check(no_search, [], fetch=False)
    for message in (str(caught.value), told(no_search)):
        assert re.match(rf"{re.escape(str(no_search))}:1: search: is missing, and a", message)
        assert "search: {method: default}" in message
        assert "\n" not in message


def test_search_may_come_from_the_command_line(no_search):
    load_sweep(no_search, ["search.optimizer.lr={uniform: [1, 2]}"])


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"search": {}}, True),
        ({"name": "x", "base": "y.yaml", "budget": {}}, True),
        ({"data": {}, "model": {}, "privacy": {}, "name": "stray", "seed": 1}, False),
        ({}, False),
    ],
)
def test_sweep_is_told_from_a_trial(tree, expected):
    assert is_sweep(tree) is expected


@pytest.mark.parametrize("text", ["", "# a comment alone\n", "null\n"])
def test_empty_file_is_called_empty(text):
    with pytest.raises(ConfigError, match=r"^x\.yaml:1: is empty\. .*dpsweep init writes one"):
        parse_yaml(text, "x.yaml")


@pytest.mark.parametrize(
    ("text", "got"), [("- 1", "a list"), ("hello", "the text 'hello'"), ("3", "3")]
)
def test_file_that_holds_no_mapping_is_told_in_plain_words(text, got):
    with pytest.raises(ConfigError, match=f"a mapping of keys to values, got {got}$"):
        parse_yaml(text, "x.yaml")


def test_list_of_values_in_a_search_is_told_of_choice(sweep_file):
    three = told(sweep_file, "search={optimizer.lr: [0.3, 1, 6]}")
    assert "search.optimizer.lr: expected one way to vary it, got the list [0.3, 1, 6]" in three
    assert "write {choice: [0.3, 1, 6]}" in three
    assert "uniform" not in three
    assert "or for any value between, {uniform: [1, 2]}" in told(
        sweep_file, "search={optimizer.lr: [1, 2]}"
    )


def test_list_of_values_in_a_base_is_told_where_a_search_stands(sweep_file):
    message = told(sweep_file, "search={method.kappa: {uniform: [0.3, 1]}}", "optimizer.lr=[1, 6]")
    assert "optimizer.lr: must be one number, got [1, 6]" in message
    assert "write under search: in a sweep file optimizer.lr: {choice: [1, 6]}" in message
    whole = told(
        sweep_file,
        "search={method.kappa: {uniform: [0.3, 1]}}",
        "train.batch_size=[64, 128]",
    )
    assert "train.batch_size: {choice: [64, 128]}" in whole


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("optimizer.learning_rate=1", "'lr'"),
        ("train.learning_rate=1", "'optimizer.lr'"),
        ("train.lr=1", "'optimizer.lr'"),
        ("learningRate=1", "'optimizer.lr'"),
        ("privacy.max_grad_norm=1", "'clip_norm'"),
        ("privacy.target_epsilon=1", "'epsilon'"),
        ("epsilon=1", "'privacy.epsilon'"),
        ("train.num_epochs=1", "'epochs'"),
        ("train.batch-size=1", "'batch_size'"),
        ("search={learning_rate: {uniform: [1, 2]}}", "'optimizer.lr'"),
        ("budget.n_trials=1", "'trials'"),
    ],
)
def test_key_of_another_library_or_section_is_suggested(sweep_file, setting, key):
    assert f"unknown key. Did you mean {key}? Known: " in told(sweep_file, setting)


def test_method_of_other_spelling_is_suggested(sweep_file):
    for name in ("DP-SGD", "dpsgd", "DP_SGD", "dp sgd"):
        message = told(sweep_file, f"method.name={name}", "search={optimizer.lr: {choice: [1]}}")
        assert f"unknown method {name!r}. Did you mean 'dp_sgd'?" in message


@pytest.mark.parametrize("name", ["my sweep", "-x", "a/b", "é", "x" * 81])
def test_bad_name_is_told_what_a_name_has_and_no_pattern(sweep_file, name):
    message = told(sweep_file, f"name={name!r}")
    assert "name: does not have the form it needs, got the text" in message
    assert "1 to 80 letters (a to z), digits, dots, dashes and underscores, beginning" in message
    assert "[A-Za-z0-9]" not in message
    assert "pattern" not in message


def test_bad_function_of_an_own_model_shows_no_pattern(sweep_file):
    source = parse_yaml("model: {name: own, function: nets}", "x.yaml")
    with pytest.raises(ConfigError) as caught:
        load_trial(source)
    assert "model.function: does not have the form it needs" in str(caught.value)
    assert "pattern" not in str(caught.value)
