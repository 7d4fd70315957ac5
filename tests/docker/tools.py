"""Validators that are not requirements of dpsweep: found, or the test that needs one is skipped."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def run(tool: str, *arguments: object, package: str) -> None:
    """Runs a validator over files; what it says is the failure's message.

    Args:
        tool: Its command, on PATH or beside this Python.
        arguments: Its own.
        package: What to install to have it, for the skip's reason.
    """
    place = shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if place is None:
        pytest.skip(f"{tool} is not installed: {package}")
    done = subprocess.run(
        [place, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def module(name: str, package: str) -> ModuleType:
    """A validator's module."""
    return pytest.importorskip(name, reason=f"{name} is not installed: {package}")


def compose_schema() -> dict[str, Any]:
    """The compose specification's own schema, as check-jsonschema ships it."""
    spec = find_spec("check_jsonschema")
    if spec is None or spec.origin is None:
        pytest.skip("check_jsonschema is not installed: pip install check-jsonschema")
    vendored = Path(spec.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema: dict[str, Any] = json.loads(vendored.read_text())
    return schema
