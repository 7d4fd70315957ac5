"""Lets the files here import one another, and the models of tests/data, and run on one thread."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models")]


@pytest.fixture(autouse=True)
def _one_thread():
    """Nets this small are several times faster on one thread than on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
