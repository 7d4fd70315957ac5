"""The tutorial, typed by a machine: each block in an empty folder, in the order it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

TUTORIAL = Path(__file__).parents[2] / "docs" / "get-started" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


@pytest.mark.slow
def test_the_tutorial_can_be_followed_literally(tmp_path):
    said = dict[str, str]()
    for kind, text in BLOCK.findall(TUTORIAL.read_text()):
        if kind == "sh":
            for line in text.splitlines():
                said[line] = shell(line, tmp_path)
        elif named := re.match(r"# (\S+)\n", text):
            (tmp_path / named[1]).write_text(text)
        else:  # typed into Python
            (tmp_path / "typed.py").write_text(text)
            shell("python typed.py", tmp_path)
    pasted = yaml.safe_load((tmp_path / "photos.yaml").read_text())["data"]
    assert yaml.safe_load(said["dpsweep data photos"])["data"] == pasted
    assert "6 trials + 1 final run in" in said["dpsweep launch sweep.yaml"]
    assert (tmp_path / "report.html").stat().st_size > 10_000
    classes = re.findall(
        r"photos/val/7/\d+\.png  (\d)", said["python model/*.py photos/val/7/*.png"]
    )
    assert len(classes) == len(list((tmp_path / "photos/val/7").iterdir()))
    assert classes.count("7") > 0.6 * len(classes)
    assert (
        "models:/digits-private@champion" in said["dpsweep export photos --register digits-private"]
    )
    script = next((tmp_path / "opacus").glob("*.py")).read_text()
    assert "-differentially private" in script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("tables.md", ["any one of 2700 training examples", "f1 0."]),
        ("users.md", ["any one of 1350 units (all training rows with one value of 'patient')"]),
    ],
)
def test_a_page_on_rows_can_be_followed_literally(page, said, tmp_path):
    printed = ""
    for kind, text in BLOCK.findall(TUTORIAL.with_name(page).read_text()):
        if kind == "sh":
            printed = "".join(shell(line, tmp_path) for line in text.splitlines())
        else:
            (tmp_path / re.match(r"# (\S+)\n", text)[1]).write_text(text)
    assert (tmp_path / "model/weights.pt").exists()
    assert all(words in re.sub(r"\s+", " ", printed) for words in said), printed
    accuracy = float(re.search(r"valid/accuracy (0\.\d+)", printed)[1])
    assert accuracy > 0.7


def shell(line, folder):
    """What the line printed; `dpsweep` and `python` are those that run this test."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout
