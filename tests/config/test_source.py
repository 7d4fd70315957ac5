"""YAML is read as people mean it, and every mistake says where it is."""

import pytest

from dpsweep.config.source import dump_yaml, parse_yaml, read_yaml, with_overrides
from dpsweep.core.errors import ConfigError


def test_scalars_are_read_as_in_yaml_1_2():
    tree = parse_yaml("{a: 1e-5, b: yes, c: off, d: true, e: 4, f: .5, g: 1_0, h: ~}", "x").tree
    assert tree["a"] == 1e-5
    assert tree["b"] == "yes"
    assert tree["c"] == "off"
    assert tree["d"] is True
    assert tree["e"] == 4
    assert tree["f"] == 0.5
    assert tree["h"] is None


def test_lines_are_known_for_every_key():
    source = parse_yaml("a: 1\nb:\n  c: [1,\n    2]\n", "x.yaml")
    assert source.at(("b", "c")) == "x.yaml:3: b.c"
    assert source.at(("b", "c", 1)) == "x.yaml:4: b.c.1"
    assert source.at(("b", "missing")) == "x.yaml:2: b.missing"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", r"x:2: a: given a second time, first on line 1"),
        ("a: {b: 1, b: 2}", r"x:1: a\.b: given a second time"),
        ("a: [1, 2", r"x:1: not valid YAML"),
        ("\ta: 1", r"x:1: not valid YAML"),
        ("- 1", r"x:1: expected a mapping of keys to values, got a list"),
        ("", r"x:1: is empty"),
        ("{[1]: 2}", r"x:1: a key must be a word"),
        ("a: !!python/object:os.system x", r"x:1: .* cannot be read|not valid YAML"),
    ],
)
def test_malformed_text_is_one_error_with_its_line(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "x")


def test_a_missing_file_and_one_that_is_no_text_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: cannot be read as text"):
        read_yaml(tmp_path / "bytes.yaml")


def test_overrides_set_nested_keys_and_are_named_in_errors():
    source = with_overrides(parse_yaml("a: {b: 1}", "x"), ["a.c=2.5", "d={e: f}"])
    assert source.tree == {"a": {"b": 1, "c": 2.5}, "d": {"e": "f"}}
    assert source.at(("a", "c")) == "--set a.c"
    assert source.at(("d", "e")) == "--set d.e"
    assert source.at(("a", "b")) == "x:1: a.b"


@pytest.mark.parametrize("setting", ["a.b", "=3"])
def test_an_override_without_key_or_value_is_refused(setting):
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        with_overrides(parse_yaml("a: 1", "x"), [setting])


def test_aliases_that_repeat_one_another_without_end_are_refused(tmp_path):
    place = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    place.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="over 100000 values once its aliases"):
        read_yaml(place)


@pytest.mark.parametrize(
    "word", ["1e5", "1e-5", "0x1F", "1_000", "off", "true", "null", "1:30", ".5"]
)
def test_a_word_that_looks_like_something_else_is_written_so_that_it_stays_a_word(tmp_path, word):
    tree = {"folder": word, "number": 1e-5, "words": [word, "plain"]}
    (tmp_path / "x.yaml").write_text(dump_yaml(tree))
    assert read_yaml(tmp_path / "x.yaml").tree == tree


def test_a_users_own_names_are_written_as_they_are_and_read_back_equal():
    tree = {"columns": {"Salary €": {"range": [0, 1]}, "Köln: a, b": ["ä", "no", "1e3"]}}
    text = dump_yaml(tree)
    assert "Salary €" in text
    assert "\\u" not in text
    assert parse_yaml(text, "x").tree == tree
