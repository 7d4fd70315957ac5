"""Some 300 malformed files and command lines, and how the first line of each answer begins.

The list is mistakes.txt: a command line, and indented its answer, without lists of known names,
which grow. After a change of words write it
anew with `python tests/cli/test_mistake_list.py`, and read the difference.
"""

import contextlib
import io
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from dpsweep.cli import main

_LENGTH = 140
LIST = Path(__file__).with_name("mistakes.txt")

BASE = """\
data: {name: digits}
model: {name: linear}
privacy: {noise_multiplier: 1.0, clip_norm: 1.0}
train: {batch_size: 100, epochs: 1}
optimizer: {lr: 0.5}
method: {name: dp_sgd}
"""
SWEEP = """\
name: mine
base: base.yaml
search:
  optimizer.lr: {log_uniform: [0.1, 10]}
sampler: {name: random}
budget: {trials: 4}
"""
FILES = {
    "base.yaml": BASE,
    "s.yaml": SWEEP,
    "budget.yaml": SWEEP.replace("base.yaml", "calibrated.yaml"),
    "calibrated.yaml": BASE.replace("noise_multiplier: 1.0", "epsilon: 4"),
    "disk.yaml": BASE.replace("dp_sgd", "disk"),
    "empty.yaml": "",
    "comment.yaml": "# nothing here\n",
    "list.yaml": "- 1\n",
    "text.yaml": "hello\n",
    "tab.yaml": "name:\tx\n",
    "twice.yaml": "seed: 1\nseed: 2\n",
    "open.yaml": "name: [1\n",
    "quote.yaml": "name: 'x\n",
    "indent.yaml": "name: x\n  base: y\n",
    "tag.yaml": "seed: !!python/name:os.system\n",
    "alias.yaml": "a: *nobody\n",
    "nosearch.yaml": SWEEP.replace("search:\n  optimizer.lr: {log_uniform: [0.1, 10]}\n", ""),
    "nobase.yaml": SWEEP.replace("base: base.yaml\n", ""),
    "nobudget.yaml": SWEEP.replace("budget: {trials: 4}\n", ""),
    "noname.yaml": SWEEP.replace("name: mine\n", ""),
    "lost.yaml": SWEEP.replace("base.yaml", "nowhere.yaml"),
    "itself.yaml": SWEEP.replace("base.yaml", "itself.yaml"),
    "values.yaml": SWEEP.replace("{log_uniform: [0.1, 10]}", "[0.3, 1, 6]"),
}


def ask(line: str) -> str:
    """The first line that a command line is answered with, as a process would print it."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["dpsweep", *shlex.split(line)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as e:
                code = e.code
    finally:
        sys.argv = before
    assert code == 2, f"{line}: {out.getvalue()}{err.getvalue()}"
    lines = err.getvalue().strip().splitlines()
    usage = [text for text in lines if text.startswith("Error: ")]  # after how the verb is typed
    first = (usage or [text for text in lines if not text.startswith("warning: ")])[0]
    return first.replace(str(Path.cwd()), "HERE").partition(" Known: ")[0][:_LENGTH].strip()


def place(folder: Path) -> None:
    """The files that the command lines name."""
    for name, text in FILES.items():
        (folder / name).write_text(text)


def pairs(text: str) -> list[tuple[str, str]]:
    lines = text.splitlines()
    return [(a, b.strip()) for a, b in zip(lines[::2], lines[1::2], strict=True)]


@pytest.mark.parametrize("part", range(6))
def test_each_mistake_is_answered_as_it_stands_in_the_list(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    place(tmp_path)
    listed = pairs(LIST.read_text())
    assert len(listed) >= 300
    told = {line: (ask(line), answer) for line, answer in listed[part::6]}
    assert {k: got for k, (got, want) in told.items() if got != want} == {}
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(FILES), "and nothing is written"


if __name__ == "__main__":
    os.environ["COLUMNS"] = "400"
    commands = [line for line, _ in pairs(LIST.read_text())] + sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        place(Path(folder))
        LIST.write_text("".join(f"{line}\n    {ask(line)}\n" for line in commands))
