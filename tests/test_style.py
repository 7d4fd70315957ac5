"""The style of docs/contributing/style.md, where a program can tell."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dpsweep"
NAMED_FILE = re.compile(r"(?<![\w./])((?:[a-z_]+/)+[a-z_]+\.py)\b")
QUESTION = re.compile(r"(What|Whether|How|Who|Which|Where)\b")


def docstrings(source):
    """(line, text) of every docstring, and of every string that describes a constant or a field."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def questions(source):
    """Line of each docstring that opens like a question."""
    return [line for line, text in docstrings(source) if QUESTION.match(text)]


def test_docstrings_open_with_an_imperative_or_a_noun_phrase():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in questions(path.read_text())
    ]
    assert len(list(PACKAGE.rglob("*.py"))) > 200
    assert found == [], "docstrings that open with What, Whether, How, Who, Which or Where"


@pytest.mark.parametrize("opening", ["What", "Whether", "How", "Who", "Which", "Where"])
def test_question_is_found_in_modules_classes_functions_and_fields(opening):
    text = f'"""{opening} it is."""'
    assert questions(text) == [1]
    assert questions(f"def f():\n    {text}") == [2]
    assert questions(f"class A:\n    {text}\n    x: int = 1\n    {text}") == [2, 4]
    assert questions('"""Whatever it is."""') == []


def test_files_that_docstrings_comments_and_pages_name_exist():
    texts = [
        path
        for top in ("dpsweep", "tests", "benchmarks", "docs", "examples")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".md")
    ]
    files = [path.as_posix() for path in texts]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(texts)
        for name in NAMED_FILE.findall(path.read_text())
        if not any(known.endswith(f"/{name}") for known in files)
        and name.split("/")[0] not in ("nets", "sub", "here")  # files of examples
    ]
    assert missing == []
