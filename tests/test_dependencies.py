"""Each package that dpsweep imports is declared in pyproject.toml, by a dependency or an extra."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Packages whose distribution has another name."""


def imported():
    """Top-level packages of others, with a place for each: `import` and `import_module(TEXT)`."""
    found = dict[str, str]()
    for place in (ROOT / "dpsweep").rglob("*.py"):
        for node in ast.walk(ast.parse(place.read_text())):
            for name in _names(node):
                found[name.split(".")[0]] = f"{place.relative_to(ROOT)}:{node.lineno}"
    return {k: v for k, v in found.items() if k not in {*sys.stdlib_module_names, "dpsweep"}}


def _names(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "dpsweep"]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        return [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return []


def declared():
    """Names of all dependencies and extras, in the spelling of a module."""
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    names = [re.match(r"[\w.-]+", line)[0] for line in [*PROJECT["dependencies"], *extras]]
    return {name.lower().replace("-", "_") for name in names}


def test_each_import_is_declared():
    known = declared()
    missing = {
        name: place
        for name, place in imported().items()
        if DISTRIBUTIONS.get(name, name).lower().replace("-", "_") not in known
    }
    assert missing == {}


def test_the_reading_of_imports_finds_those_of_all_kinds():
    found = imported()
    assert {"torch", "yaml", "PIL", "timm", "kaleido"} <= found.keys()
    assert not {"os", "dpsweep"} & found.keys()
