"""The two sources of a step's secret draws: `privacy.noise.source`.

    fast      Philox (Salmon et al. 2011) and NumPy's ziggurat. Statistically sound, and nothing
              more: Philox was not made to withstand somebody who searches for its key.
    secure    the ChaCha20 cipher's key stream (RFC 8439), keyed anew for each step and stream;
              to tell it from chance is to break the cipher. Of it, for each value,

                  z = (z_1 + z_2 + z_3 + z_4) / 2,     z_j = sqrt(-2 ln u_j) cos(2 pi v_j)

              and its neighbour the same with sin. A sum of four standard normals has variance
              4, and half of it variance 1: sigma is what it was, and halving rounds nothing.

Why a sum: one draw by Box and Muller is a function of two uniforms of 53 bits, and the doubles that
it can be are so few that a noisy value may tell which sum lies under it. Of 2n draws, an attacker
has 2^(53 (2n - 1)) to try: 2^159 here, where n = 2 (Holohan and Braghin, Secure Random Sampling in
Differential Privacy, ESORICS 2021, arXiv:2107.10138, section 5.1, as counted by Opacus, whose
secure mode sums four as well, and needs a package that no longer installs). Neighbours share their
u_j and v_j, but no value uses one twice: cos + sin of one angle would be one draw, and not two.

The rounding to a grid in release.py follows for both sources.

Noise depends on nothing that a step computes, so a thread of its own may draw it while examples are
processed (`NoiseDraw`): the same draws in the same order, of that step alone. Nothing is drawn
ahead of its step, so that a checkpoint holds no noise and a replayed step draws its own again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from dpsweep.core.seeds import Draws, Secret, Stream

DRAWS_PER_VALUE = 4
"""Twice the n of Holohan and Braghin. The square root of it, 2, is what their sum is divided by."""

_BLOCK = 1 << 15
"""Values at a time: what they need stays in a core's cache, and is one thread's work."""

_WORD_BYTES = 8
_NO_TEXT = memoryview(bytes(_BLOCK * _WORD_BYTES))
_KEY_STREAM_BYTES = 1 << 38
"""Key stream of one key and nonce: the block counter has 32 bits, blocks 64 bytes."""


class SecureDraws:
    """Uniform and normal draws from the key stream of ChaCha20; the same for the same key.

    Attributes:
        left_bytes: Bytes of the key stream that are left before its counter would start over.

    Args:
        key: 256 bits, used for this and nothing else. Kept by the cipher alone.

    Raises:
        ValueError: If `key` has another length.
    """

    def __init__(self, key: bytes) -> None:
        # a fixed nonce is safe here: a key serves one step and one stream alone
        self._cipher = Cipher(ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
        self._words = np.empty(_BLOCK, dtype="<u8")
        self.left_bytes = _KEY_STREAM_BYTES

    def __reduce__(self) -> NoReturn:
        # a pickled cipher would carry its key out of this process
        raise TypeError("secret draws are made where they are used, and not sent")

    def random(self, size: int, /) -> NDArray[np.float64]:
        """Uniforms of [0, 1); takes 8 bytes of the key stream a value."""
        out = np.empty(size)
        for start in range(0, size, _BLOCK):
            self._uniform(out[start : start + _BLOCK])
        return out

    def standard_normal(self, size: tuple[int, ...], /) -> NDArray[np.float64]:
        """Normals, each half the sum of four; takes 32 bytes of the key stream a value."""
        num = math.prod(size)
        # one small buffer for all blocks: it stays in a core's cache
        out, buffer = np.empty(num), np.empty((5, min(num + 1, _BLOCK) // 2))
        for start in range(0, num, _BLOCK):
            part = out[start : start + _BLOCK]
            pairs = self._pairs(buffer[:, : (len(part) + 1) // 2])
            part[:] = pairs.reshape(-1)[: len(part)]
        return out.reshape(size)

    def _pairs(self, buffer: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute values with cos and neighbours with sin, (2, num), in `buffer`, (5, num)."""
        sums, (radius, angle, turned) = buffer[:2], buffer[2:]
        sums[:] = 0
        for _ in range(DRAWS_PER_VALUE):
            self._radius(radius)
            self._uniform(angle)
            np.multiply(angle, 2 * math.pi, out=angle)
            for total, turn in zip(sums, (torch.cos, torch.sin), strict=True):
                turn(torch.from_numpy(angle), out=torch.from_numpy(turned))  # thrice as fast
                np.multiply(turned, radius, out=turned)
                np.add(total, turned, out=total)
        return np.multiply(sums, 1 / math.sqrt(DRAWS_PER_VALUE), out=sums)

    def _radius(self, out: NDArray[np.float64]) -> None:
        """Compute sqrt(-2 ln u), u = (word + 1) / 2^64: up to 9.42, beyond which lie 5e-20."""
        out[:] = self._next(len(out))
        np.add(
            out, 1.0, out=out
        )  # as a double, since the largest word would overflow; u = 0 has no log
        np.multiply(out, 2.0**-64, out=out)
        np.log(out, out=out)
        np.multiply(out, -2.0, out=out)
        np.sqrt(out, out=out)

    def _uniform(self, out: NDArray[np.float64]) -> None:
        """Fill `out` with the upper 53 of 64 bits, divided by 2^53."""
        words = self._next(len(out))
        np.right_shift(words, 11, out=words)
        np.multiply(words, 2.0**-53, out=out)

    def _next(self, num: int) -> NDArray[np.uint64]:
        """Draw `num` words of 64 random bits, at most a block; overwritten by the next call.

        Raises:
            OverflowError: If the key stream would repeat itself.
        """
        size = num * _WORD_BYTES
        self.left_bytes -= size  # before drawing: a key stream that repeats would cancel noise
        if self.left_bytes < 0:
            raise OverflowError(f"one step drew more than {_KEY_STREAM_BYTES} bytes of one key")
        words = self._words[:num]
        # the key stream is the encryption of zeros
        self._cipher.update_into(_NO_TEXT[:size], words.view(np.uint8).data)
        return words


def _make_fast_draws(secret: Secret, step: int, name: Stream) -> Draws:
    return secret.stream(step, name)


def _make_secure_draws(secret: Secret, step: int, name: Stream) -> Draws:
    return SecureDraws(secret.stream_key(step, name))


ALIGNED = 16
"""Values: each leaf begins where a tensor of its own might, 64 bytes apart in float32."""


def leaf_slices(sizes: Sequence[int]) -> list[slice]:
    """Slices of leaves of these sizes in the flat tensor of `draw_noise`.

    >>> leaf_slices([3, 17, 1])
    [slice(0, 3, None), slice(16, 33, None), slice(48, 49, None)]
    """
    starts = accumulate(map(_padded, sizes), initial=0)
    # `accumulate` has one start more, the end of all
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def view_leaves(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Views of leaves of these shapes in a contiguous tensor, laid out like `draw_noise`'s.

    One operation makes each, where a slice and then a view would be two.
    """
    parts = torch.split(flat, [_padded(math.prod(shape)) for shape in shapes])
    return [
        part.as_strided(tuple(shape), _contiguous_strides(shape))
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def draw_noise(rng: Draws, sizes: Sequence[int], pinned: bool) -> torch.Tensor:
    """Draw N(0, 1) independently for leaves of these sizes, in one flat float64 tensor.

    Args:
        rng: Stream of one step; used up leaf by leaf.
        sizes: Values of each leaf. Between leaves are zeros, see `leaf_slices`.
        pinned: True for page-locked memory, from which a GPU copies while the host goes on.
    """
    return _fill(_empty(sizes, pinned), rng, sizes)


class NoiseDraw:
    """The noise of one step, which a thread draws from now on. As secret as the step's stream.

    NumPy and the cipher let other threads run meanwhile.

    Args:
        rng, sizes, pinned: As for `draw_noise`.
    """

    def __init__(self, rng: Draws, sizes: Sequence[int], pinned: bool) -> None:
        self._sizes = list(sizes)
        flat = _empty(sizes, pinned)  # here, as CUDA's allocator belongs to this thread
        self._draw_trial = _noise_thread().submit(_fill, flat, rng, self._sizes)

    def wait(self, sizes: Sequence[int]) -> torch.Tensor:
        """Wait for the noise, and return it for the leaves of these sizes."""
        assert list(sizes) == self._sizes, "noise was drawn for another release"
        return self._draw_trial.result()


def _empty(sizes: Sequence[int], pinned: bool) -> torch.Tensor:
    length = sum(map(_padded, sizes))
    return torch.zeros(length, dtype=torch.float64, pin_memory=pinned)


def _fill(flat: torch.Tensor, rng: Draws, sizes: Sequence[int]) -> torch.Tensor:
    values = flat.numpy()
    for part, size in zip(leaf_slices(sizes), sizes, strict=True):
        values[part] = rng.standard_normal((size,))
    return flat


@cache
def _noise_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "noise")


SOURCES: Mapping[str, Callable[[Secret, int, Stream], Draws]] = MappingProxyType(
    {"fast": _make_fast_draws, "secure": _make_secure_draws}
)
"""Sources by their name in a config."""
