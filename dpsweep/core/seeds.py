"""Two kinds of randomness that never mix: public seeds and secret streams.

Public streams (weights at the start, the search's proposals) come from the sweep's seed:
anyone may know them and everyone can repeat them. The secret ones (which examples a step
samples, the noise it adds) are the privacy itself. They start from 256 bits of the
operating system's entropy and are derived per step by a keyed hash, so that a step that
is replayed after a crash draws the same batch and the same noise: it releases nothing
new and costs nothing more.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SECRET_BYTES = 32
TEST_SECRET_VARIABLE = "DPSWEEP_TEST_SECRET"

Stream = Literal["sample", "noise", "groups"]


class Draws(Protocol):
    """Random numbers of one secret stream. NumPy's generators have this interface."""

    def random(self, size: int, /) -> NDArray[np.float64]:
        """Independent uniforms of [0, 1), multiples of 2^-53, shape (size,)."""

    def standard_normal(self, size: tuple[int, ...], /) -> NDArray[np.float64]:
        """Independent draws of N(0, 1), of shape `size`."""


@dataclass(frozen=True)
class Secret:
    """Source of a trial's sampling and noise. Its bytes are in no repr, log, config or artifact.

    >>> Secret.fixed("for a doctest")
    Secret(void=True)
    """

    key: bytes = field(repr=False)  # 256 bits
    # True if the key was fixed by a test and not drawn. A result trained with it has no privacy,
    # and says so
    void: bool = False

    @classmethod
    def draw(cls) -> Secret:
        """Draw a fresh secret from the operating system."""
        return cls(os.urandom(SECRET_BYTES))

    @classmethod
    def fixed(cls, text: str) -> Secret:
        """Make the same secret for the same text; for tests only, as it voids privacy."""
        return cls(hashlib.blake2b(text.encode(), digest_size=SECRET_BYTES).digest(), void=True)

    @classmethod
    def for_new_trial(cls) -> Secret:
        """Draw a secret, or make the fixed one of a test that sets DPSWEEP_TEST_SECRET."""
        text = os.environ.get(TEST_SECRET_VARIABLE)
        return cls.fixed(text) if text else cls.draw()

    def bind_to_config(self, config: str) -> Secret:
        """Derive the secret for one config, so that another config has other noise.

        Were the noise the same, the difference of two releases would have none.
        """
        return Secret(
            hashlib.blake2b(config.encode(), key=self.key, digest_size=SECRET_BYTES).digest(),
            void=self.void,
        )

    def stream(self, step: int, name: Stream) -> np.random.Generator:
        """Make the generator of one step's sampling or noise; the same for the same arguments.

        A counter-based Philox with a 128-bit key. NumPy's normal draws use the ziggurat
        method; torch's CPU generator keeps 32 bits of a seed, too few for a secret.
        """
        import numpy as np

        digest = self._derive_key(step, name, num_bytes=16)
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))

    def stream_key(self, step: int, name: Stream) -> bytes:
        """Derive a cipher's 256-bit key for one step's sampling or noise; as secret as the secret.

        Of another length than the key of `stream`, and therefore unrelated to it: BLAKE2b hashes
        the length along with the message.
        """
        return self._derive_key(step, name, num_bytes=SECRET_BYTES)

    def _derive_key(self, step: int, name: Stream, num_bytes: int) -> bytes:
        message = step.to_bytes(8, "little") + name.encode()
        return hashlib.blake2b(message, key=self.key, digest_size=num_bytes).digest()


def derive_public_seed(seed: int, *path: str | int) -> int:
    """Derive a 32-bit seed for one public purpose from the sweep's own.

    >>> derive_public_seed(0, "search", 1) == derive_public_seed(0, "search", 1)
    True
    >>> derive_public_seed(0, "search", 1) == derive_public_seed(0, "search", 2)
    False
    """
    message = "/".join(map(str, (seed, *path))).encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=4).digest(), "little")
