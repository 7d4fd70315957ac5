"""Lets the files here share `oracle` and `zoo`, and the models of tests/data."""

import sys
from pathlib import Path

import pytest

from dpsweep.privacy import engine

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "models")]


@pytest.fixture
def forgotten(monkeypatch):
    """A process that has tried no model yet, and has said nothing."""
    monkeypatch.setattr(engine, "_stateless", set())
    monkeypatch.setattr(engine, "_wrong", {})
    monkeypatch.setattr(engine, "_mixing", {})
    monkeypatch.setattr(engine, "_logged", set())
