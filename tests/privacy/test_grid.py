"""The law of a cell of the release's grid, under the fast source.

NumPy's ziggurat makes a normal of one 64-bit word in 98.8 % of all draws: 8 bits choose one of 256
layers, one the sign, 52 a point of the layer. So the probability of a cell is a count of points.
Here a generator gets chosen words, which shows the layers' widths and where the tail has gaps; the
counts follow from them.
"""

import ctypes
import math
import threading
from collections.abc import Iterable

import numpy as np
import pytest
from scipy import stats

from dpsweep.privacy.release import GRID_BITS

WIDEST, NARROWEST = 2.0**-GRID_BITS, 2.0 ** -(GRID_BITS + 1)
"""Cells in noise deviations: the grid is a power of two below the noise's deviation."""

_ROUTINES = {
    "next_uint64": ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p),
    "next_uint32": ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p),
    "next_double": ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p),
    "next_raw": ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p),
}


class BitGenerator(ctypes.Structure):
    """`bitgen_t` of numpy/random/bitgen.h."""

    _fields_ = (
        ("state", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _ROUTINES),
    )


class Words:
    """A bit generator that returns given words."""

    def __init__(self, words: Iterable[int]) -> None:
        left = iter(words)
        answers = {
            "next_uint64": lambda _: next(left),
            "next_uint32": lambda _: next(left) >> 32,
            "next_double": lambda _: (next(left) >> 11) * 2.0**-53,
            "next_raw": lambda _: next(left),
        }
        self._removable_share = {name: kind(answers[name]) for name, kind in _ROUTINES.items()}
        self._struct = BitGenerator(
            None, *(ctypes.cast(call, ctypes.c_void_p) for call in self._removable_share.values())
        )
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.capsule = make(ctypes.addressof(self._struct), b"BitGenerator", None)
        self.lock = threading.Lock()


def normal(layer: int, point: int, *doubles: int) -> float:
    """The normal of a point of a layer; `doubles` are the uniforms that follow, times 2^53."""
    words = [point << 9 | layer, *(u << 11 for u in doubles), 0, 0]
    return float(np.random.Generator(Words(words)).standard_normal())


STEPS = np.array([normal(layer, 1) for layer in range(256)])
"""Distance of neighbouring points, by layer."""

TAIL = float(STEPS[255] * 2**52)
"""Where the tail begins, in deviations: the widest layer but the base strip, layer 0."""


def probability(cell: int, width: float) -> float:
    """That |z| rounds to `cell` times `width`, below the tail: points, each as often accepted."""
    low, high = (cell - 0.5) * width, (cell + 0.5) * width
    points = np.ceil(high / STEPS) - np.ceil(low / STEPS)
    edges = STEPS * 2.0**52
    heights = np.exp(-(edges**2) / 2)
    above = np.concatenate([[1.0, 1.0], heights[1:-1]])  # f of the next narrower layer
    middle = math.exp(-((cell * width) ** 2) / 2)
    accepted = np.clip((middle - heights) / (above - heights), 0, 1)
    accepted[0] = 1.0  # the base strip, left of the tail
    inside = edges > high
    # Layers have one area; under the curve is this share of it, the rest is drawn again.
    once = math.sqrt(math.pi / 2) / (256 * edges[0] * heights[255])
    return float((points * accepted * inside).sum() * 2.0**-52 / 256) / once


def unevenness(width: float) -> float:
    """The largest relative error of a cell's probability, over 500 cells below the tail."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for x in rng.uniform(0.01, TAIL - 0.01, 500):
        cell = round(x / width)
        law = 2 * stats.norm.pdf(cell * width) * width  # over width^2 / 24 of it is curvature
        worst = max(worst, abs(probability(cell, width) / law - 1))
    return worst


def test_a_word_makes_the_normal_that_the_count_assumes():
    for layer in (2, 77, 255):
        for point in (3, 2**40 + 1, 2**50):
            assert normal(layer, point) == point * STEPS[layer]
    assert pytest.approx(3.6541528853610088, rel=1e-14) == TAIL


@pytest.mark.parametrize("width", [NARROWEST, WIDEST])
def test_a_cell_has_the_probability_of_the_normal_law(width):
    assert unevenness(width) < 8e-9
    assert unevenness(width / 256) > 2e-7  # the grid of 2^-30 that was used before


def gap(x: float) -> float:
    """Distance of neighbouring values that the tail can have near x."""
    u = round((1 - math.exp(-(x - TAIL) * TAIL)) * 2**53)
    always = 2**53 - 1  # the uniform that accepts
    one, other = (abs(normal(0, 2**52 - 1, v, always)) for v in (u, u + 1))
    assert abs(one - x) < 0.01
    return other - one


def test_no_cell_is_empty_that_any_draw_will_see():
    assert gap(9.65) < NARROWEST
    assert 2 * stats.norm.sf(9.65) * 1e12 < 1e-9  # of 10^12 draws
    assert gap(8.3) > NARROWEST / 256  # the grid of 2^-30 had holes there
    # and up to 7 deviations, 3e-12 of all draws, a cell's probability is right up to 1e-4
    assert gap(7.0) < 1e-4 * NARROWEST
