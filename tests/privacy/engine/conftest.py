"""Lets the files here share `oracle` and `zoo` in any import mode of pytest."""

import sys
from pathlib import Path

import pytest

from dpsweep.privacy import engine

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def forgotten(monkeypatch):
    """A process that has tried no model yet, and has said nothing."""
    monkeypatch.setattr(engine, "_doubts", {})
    monkeypatch.setattr(engine, "_crowds", {})
    monkeypatch.setattr(engine, "_said", set())
