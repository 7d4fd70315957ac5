"""The glossary names code, YAML keys and verbs that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    re.split(r" *\| *", line.strip("| "))
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| term")
]


def names_in(module: Path) -> set[str]:
    """Names that a module defines at its top level."""
    found = set()
    for node in ast.parse(module.read_text()).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


def exists(dotted: str) -> bool:
    """True if `dotted` is a module of the package, or a top-level name of one."""
    place = ROOT / dotted.replace(".", "/")
    if place.is_dir() or place.with_suffix(".py").exists():
        return True
    module = place.parent.with_suffix(".py")
    return module.exists() and place.name in names_in(module)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_code_of_a_term_exists(row):
    assert len(row) == 4, f"{row[0]}: a line has four columns"
    code = re.fullmatch(r"`(dpsweep[\w.]*)`", row[3])
    assert code, f"{row[0]}: {row[3]} is no dotted name"
    assert exists(code[1]), f"{row[0]}: {row[3]} is not in the code"


def test_each_term_stands_once():
    terms = [row[0] for row in ROWS]
    assert sorted(terms) == sorted(set(terms))


def test_a_name_that_is_gone_is_found():
    assert exists("dpsweep.privacy.release.release")
    assert not exists("dpsweep.privacy.release.no_such_function")
    assert not exists("dpsweep.no_such_module")
