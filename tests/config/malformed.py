# ruff: noqa: RUF001 - letters that look alike are what is tested
"""Strategies for files that are not what they should be: the shipped ones, changed at random."""

from copy import deepcopy
from pathlib import Path

import yaml
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
_NAMES = ("quickstart", "digits_dp_sgd", "digits_budgets")  # digits_methods takes seconds to check


def _shipped():
    """(tree, is a sweep) of the shipped files about the data that need no download."""
    base = yaml.safe_load((ROOT / "configs/digits_cnn.yaml").read_text())
    yield base, False
    for name in _NAMES:
        tree = yaml.safe_load((ROOT / f"sweeps/{name}.yaml").read_text())
        if isinstance(tree["base"], str):
            tree["base"] = yaml.safe_load((ROOT / "sweeps" / tree["base"]).read_text())
        yield tree, True


SHIPPED = list(_shipped())

JUNK = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, "", " ", "nan", "inf", "-inf", "null", [], {}, [[]], [None], [{}]),
            *(float("nan"), float("inf"), -float("inf"), 0, -1, 1e308, -1e-308, 10**30, -(10**400)),
            *({"": 1}, {"a": {"b": {"c": {}}}}, {"name": None}, {"name": []}, {"name": "dsik"}),
            *(
                {"uniform": []},
                {"uniform": [2, 1]},
                {"uniform": ["a", "b"]},
                {"uniform": [1, 1e999]},
            ),
            *({"log_uniform": [0, 1]}, {"log_uniform": [-1, 1]}, {"integer": [1.5, 2]}),
            *({"integer": [0, 10**30]}, {"choice": []}, {"choice": [[], {}]}, {"choice": "abc"}),
            *({"one_of": []}, {"one_of": [1]}, {"one_of": [{"name": "disk"}, None]}, {"each": []}),
            *({"choice": [float("nan")]}, {"uniform": [0, 1], "choice": [1]}, {"derive": 3}),
            *({"derive": "1 +"}, {"derive": "optimizer.lr"}, {"derive": "method.kappa"}),
            *({"derive": "__import__('os')"}, {"derive": "1/0"}, {"derive": "10**10**10"}),
            *(
                "default",
                "published",
                "⅕",
                "ｆｆｔｋｆ",
                "dp_ѕgd",
                "a" * 5000,
                "\x00",
                "\ud7ff",
                "\u202e",
            ),
            *("train.epochs <", "1/0 < 2", "nope > 3", "9**9**9**9 > 1", "(" * 300, "not " * 300),
            *(
                "../../../etc/passwd",
                "/etc/passwd",
                "~root",
                "${HOME}",
                "!!python/object:os.system",
            ),
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 2) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(-2, 2), max_size=2),
)


def _places(tree, path=()):
    """Every path of keys and list indices in a tree."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def _holder(tree, path):
    for key in path[:-1]:
        tree = tree[key]
    return tree


@st.composite
def changed_trees(draw):
    """A tree with one to three changes, each to some key."""
    tree = deepcopy(draw(st.sampled_from(SHIPPED))[0])
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(tree))))
        holder, key = _holder(tree, path), path[-1]
        match draw(st.sampled_from(["replace", "delete", "add", "rename", "wrap", "move"])):
            case "replace":
                holder[key] = draw(JUNK)
            case "delete":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[draw(st.text(max_size=12))] = draw(JUNK)
            case "rename" if isinstance(holder, dict):
                holder[f"{key}{draw(st.sampled_from(['s', '.', ' ', 'е', '.x', '.0']))}"] = (
                    holder.pop(key)
                )
            case "wrap":
                holder[key] = draw(st.sampled_from([[holder[key]], {"value": holder[key]}]))
            case _:
                tree[str(key)] = deepcopy(holder[key])
        if not tree:
            break
    return tree


def _written(tree):
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode("utf-8", "replace")


@st.composite
def noisy_bytes(draw):
    """A shipped file with some of its bytes or lines lost, doubled or replaced."""
    raw = _written(draw(st.sampled_from(SHIPPED))[0])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        length = draw(st.integers(0, 30))
        noise = draw(
            st.binary(max_size=6)
            | st.sampled_from(
                [b"\x00", b"\xff\xfe", b"\t", b"&a *a", b"<<: *b", b"!!python/none ", b"{", b"]"]
            )
            | st.sampled_from(
                [b"? ", b"- ", b": ", b"|\n", b"---\n", b"...\n", b"%YAML 9.9\n", b"'"]
            )
        )
        match draw(st.sampled_from(["put", "over", "cut", "double", "end"])):
            case "put":
                raw = raw[:at] + noise + raw[at:]
            case "over":
                raw = raw[:at] + noise + raw[at + len(noise) :]
            case "cut":
                raw = raw[:at] + raw[at + length :]
            case "double":
                raw = raw[:at] + raw[at : at + length] * 2 + raw[at + length :]
            case "end":
                raw = raw[:at]
    return raw


def files():
    """Bytes of a malformed sweep or trial file."""
    return changed_trees().map(_written) | changed_trees().map(_written) | noisy_bytes()
