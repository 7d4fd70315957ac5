"""Everything in the documentation that can be typed: files, code, command lines, links."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from dpsweep.cli import app
from dpsweep.config.source import parse_yaml, read_yaml
from dpsweep.config.sweep import parse_sweep
from dpsweep.config.trial import load_trial, resolve_trial_source
from dpsweep.core.errors import ConfigError
from dpsweep.data import validate_data

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for place in (ROOT, ROOT / "docs", ROOT / "examples")
    for page in (place.glob("*.md") if place == ROOT else place.rglob("*.md"))
)
GENERATED = {"reference/cli.md", "reference/trial.md", "reference/sweep.md"}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
RUNS = ("docs/concepts/accounting.md",)
"""Pages whose Python runs within seconds, by itself."""

page_names = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def blocks(page: Path, kind: str) -> list[str]:
    """Fenced blocks of a language."""
    return [text for name, text in FENCE.findall(page.read_text()) if name == kind]


def is_valid_data(section: object) -> bool:
    """True if only a tokenizer's package may be missing, which is looked for last."""
    try:
        validate_data(section)
    except ConfigError as e:
        return "nor an installed package" in str(e)
    return True


@page_names
def test_yaml_files_in_the_text_load(page, tmp_path):
    for text in blocks(page, "yaml"):
        if named := re.match(r"# (\S+\.yaml)\n", text):  # so that a sweep below finds its base
            (tmp_path / named[1]).write_text(text)
        if "{name: folder" in text or "base: photos.yaml" in text:
            continue  # tests/api/test_tutorial.py types these
        source = parse_yaml(text, str(tmp_path / "shown.yaml"))
        keys = set(yaml.safe_load(text))
        if {"search", "budget"} <= keys:
            assert parse_sweep(source, tmp_path).space.domains
        elif keys == {"data"}:
            assert is_valid_data(source.tree["data"])
        else:
            assert {"data", "model", "train", "method"} <= keys, f"{text}: not a whole file"
            load_trial(resolve_trial_source(source, []))


def test_example_sweeps_load(monkeypatch):
    places = sorted((ROOT / "examples").glob("*/sweep.yaml"))
    assert len(places) == 5
    for place in places:
        monkeypatch.chdir(place.parent)  # where its first lines say to type
        assert parse_sweep(read_yaml("sweep.yaml"), place.parent).space.domains


def command_lines(page: Path) -> Iterator[str]:
    """Each `dpsweep VERB ...` in code, joined where it goes on, without its comment."""
    text = re.sub(r" *\\\n *", " ", page.read_text())
    for match in re.finditer(r"(?:^ {4,}|^\$ |^|`)(dpsweep [a-z][^\n`]*)(`?)", text, re.M):
        line = match[1]
        if re.match(r"dpsweep [a-z]+(?: \(|:|,|\.| is | does )", line):
            continue  # prose
        yield re.split(r" {2,}#| # | \| | > |;| && ", line)[0].strip()


def parse(line: str) -> None:
    """Read a command line as the program would; nothing runs."""
    command = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"{line}: no such verb"
        command, words = command.commands[words[0]], words[1:]
    if words:  # a verb's name alone is a mention of it
        command.make_context("dpsweep", words)


@page_names
def test_command_lines_parse(page):
    for line in command_lines(page):
        try:
            parse(line)
        except Exception as e:
            pytest.fail(f"{page.relative_to(ROOT)}: {line}: {type(e).__name__}: {e}")


def test_a_wrong_command_line_is_found():
    with pytest.raises(AssertionError, match="no such verb"):
        parse("dpsweep lanch FILE")
    with pytest.raises(Exception, match="--trails"):
        parse("dpsweep launch FILE --trails 3")
    with pytest.raises(Exception, match="unexpected extra argument"):
        parse("dpsweep best ONE TWO")


def test_command_lines_are_found():
    found = {line for page in PAGES for line in command_lines(page)}
    assert "dpsweep launch sweeps/quickstart.yaml" in found
    assert len(found) > 80


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@page_names
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:")):
            continue
        place = (page.parent / target).resolve() if target else page
        if str(place).removeprefix(f"{ROOT}/docs/") in GENERATED:
            continue  # `mkdocs build --strict` looks at these
        assert place.exists(), f"{link}: no such file"
        assert place.is_relative_to(ROOT), f"{link}: outside the repository"
        if anchor:
            assert anchor in anchors(place), f"{link}: no such heading"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("name", RUNS)
def test_python_in_the_text_runs(name):
    for text in blocks(ROOT / name, "python"):
        exec(compile(text, name, "exec"), {})


def type_in(folder: Path, *words: str) -> str:
    """What a command prints; it must end well."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_python_that_launches_sweeps_runs(tmp_path):
    (tmp_path / "sweeps").symlink_to(ROOT / "sweeps")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    less = ("budget.explore.trials=2", "train.epochs=3")
    sets = [word for setting in less for word in ("--set", setting)]
    launch = (sys.executable, "-m", "dpsweep", "launch", "sweeps/quickstart.yaml", *sets)
    type_in(tmp_path, *launch)
    said = type_in(tmp_path, sys.executable, "-c", "".join(blocks(ROOT / "README.md", "python")))
    assert "-differentially private" in said
    assert list((tmp_path / "best").glob("*.pt"))
    page = ROOT / "docs/get-started/python.md"
    said = type_in(tmp_path, sys.executable, "-c", "".join(blocks(page, "python")))
    assert "-differentially private" in said
    assert (tmp_path / "history.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    mkdocs = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet")
    type_in(ROOT, *mkdocs, "--site-dir", str(tmp_path))
    verbs = (tmp_path / "reference/cli/index.html").read_text()
    assert "accept-changes" in verbs
    keys = (tmp_path / "reference/trial/index.html").read_text()
    assert "max_physical_batch" in keys
    assert "L2 bound" in keys


def test_nothing_points_outside_the_repository():
    texts = [*PAGES, *(ROOT / "dpsweep").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    outside = re.compile(r"(?<![\w/])(?:METHODS|ARCHITECTURE|STYLE)\.md|\.\./shared/(?!data)")
    me = Path(__file__)
    found = [str(p.relative_to(ROOT)) for p in texts if p != me and outside.search(p.read_text())]
    assert found == []


@pytest.mark.slow
def test_commands_that_check_the_guarantee_run(tmp_path):
    """With fewer runs than the page says, which change what is found and not whether it works."""
    lines = [x for x in command_lines(ROOT / "docs/concepts/held.md") if "FILE" not in x]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(re.sub(r"--(runs|one-run) \d+", r"--\1 40", line))[1:]
        done = subprocess.run(
            [sys.executable, "-m", "dpsweep", *words],
            cwd=ROOT,
            env={**os.environ, "DPSWEEP_STATE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
