"""Lets the files here share `oracle` and `zoo` in any import mode of pytest."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def forgotten(monkeypatch):
    """A process that has tried no model yet, and has said nothing."""
    for room, memory in (("engine.doubt", "_answered"), ("engine", "_said")):
        module = import_module(f"dpsweep.privacy.{room}")
        monkeypatch.setattr(module, memory, type(getattr(module, memory))())
