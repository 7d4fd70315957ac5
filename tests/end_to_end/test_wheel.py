"""The wheel alone, in an environment and a folder of its own: nothing comes from the repository."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("dpsweep", "sweeps", "configs", "pyproject.toml", "README.md")
_TIMEOUT = 900  # seconds, of one command on a loaded machine

GUARD = """\
import sys

def _refuse(event, args):
    path = args[0] if event == "open" and args else ""
    if isinstance(path, str) and path.startswith({forbidden!r}):
        raise RuntimeError("the repository's " + path + " was opened")

sys.addaudithook(_refuse)
"""
"""Runs at the start of every process of the environment, Ray's workers included."""

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def run(*args, cwd, **env):
    """Standard output of a command that must succeed, without what leads to the repository."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DPSWEEP", "RAY"))}
    done = subprocess.run(
        list(map(str, args)),
        cwd=cwd,
        env={**kept, **env},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, offline, by the setuptools that is installed."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        place = ROOT / name
        if place.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(place, sources / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(place, sources)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out)
    run(*pip, *offline, sources, cwd=sources)
    (built,) = out.glob("dpsweep-*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory):
    """Commands of a fresh environment: the wheel, and the heavy packages it depends on by path."""
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    python = place / "bin/python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=place)
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", script, cwd=place).strip())
    forbidden = tuple(f"{ROOT / name}{os.sep}" for name in ("dpsweep", "sweeps", "configs"))
    (site / "_no_repository.py").write_text(GUARD.format(forbidden=forbidden))
    heavy = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    # The lines of a .pth file are read in order. Ours come after the wheel's own folder.
    (site / "heavy.pth").write_text("\n".join(["import _no_repository", *heavy]) + "\n")
    return place / "bin"


def test_guard_stops_what_opens_the_repository(bin_folder, tmp_path):
    """The other test could pass without it."""
    code = f"open({str(ROOT / 'sweeps/quickstart.yaml')!r})"
    done = subprocess.run(
        [bin_folder / "python", "-c", code], cwd=tmp_path, capture_output=True, check=False
    )
    assert b"the repository's" in done.stderr


def test_wheel_initializes_checks_and_launches_a_sweep_in_an_empty_folder(bin_folder, tmp_path):
    dpsweep, python = bin_folder / "dpsweep", bin_folder / "python"
    where = run(python, "-c", "import dpsweep; print(dpsweep.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(bin_folder.parent)
    version = run(dpsweep, "--version", cwd=tmp_path)
    assert version == run(python, "-m", "dpsweep", "--version", cwd=tmp_path)
    assert version.startswith("dpsweep ")

    listed = run(dpsweep, "init", "--list", cwd=tmp_path, COLUMNS="200")
    shipped = [p.relative_to(ROOT / "sweeps") for p in (ROOT / "sweeps").rglob("*.yaml")]
    assert all(path.with_suffix("").as_posix() in listed for path in shipped)
    run(dpsweep, "init", "--from", "quickstart", cwd=tmp_path)
    assert "valid trials" in run(dpsweep, "check", "quickstart.yaml", cwd=tmp_path)

    run(dpsweep, "init", "--method", "fftkf", "--name", "mine", cwd=tmp_path)
    assert "valid trials" in run(dpsweep, "check", "mine.yaml", cwd=tmp_path)
    tiny = ("budget.trials=2", "confirm=null", "train.epochs=1", "train.evaluate_every=1")
    settings = [part for setting in tiny for part in ("--set", setting)]
    run(dpsweep, "launch", "mine.yaml", *settings, "-q", cwd=tmp_path, DPSWEEP_PICTURES="0")
    trials = json.loads(run(dpsweep, "status", "mine", "--json", cwd=tmp_path))
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    assert "valid trial" in run(dpsweep, "check", "best.yaml", cwd=tmp_path)
