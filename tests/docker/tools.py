"""Validators, of the extra docker-test: found, or the test that needs one is skipped."""

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
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


_REMEDY = "is not installed: pip install 'dpsweep[docker-test]'"


def tree(name: str) -> dict[str, Any]:
    """What a YAML file of docker/ holds."""
    found: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text())
    return found


def run(tool: str, *arguments: object) -> None:
    """Runs a validator over files; what it says is the failure's message.

    Args:
        tool: Its command, beside this Python or on PATH.
        arguments: Its own.
    """
    place = shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if place is None:
        pytest.skip(f"{tool} {_REMEDY}")
    done = subprocess.run(
        [place, *map(str, arguments)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def module(name: str) -> ModuleType:
    """A validator's module."""
    return pytest.importorskip(name, reason=f"{name} {_REMEDY}")


def compose_schema() -> dict[str, Any]:
    """The compose specification's own schema, as check-jsonschema ships it."""
    spec = find_spec("check_jsonschema")
    if spec is None or spec.origin is None:
        pytest.skip(f"check_jsonschema {_REMEDY}")
    vendored = Path(spec.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema: dict[str, Any] = json.loads(vendored.read_text())
    return schema
