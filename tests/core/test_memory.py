"""What a process holds, as Linux tells it."""

import mmap

from dpsweep.core import memory

SIZE = 2**26
FRESH = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Memory of its own; Python's could be what another test gave back."""


def test_own_memory_is_what_was_written_and_not_what_is_mapped(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(b"x" * SIZE)
    before, resident = memory.own(), memory.resident()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[i] for i in range(0, SIZE, 4096)) > 0
        assert memory.own() - before < 0.1 * SIZE
        assert memory.resident() - resident > 0.9 * SIZE
    with mmap.mmap(-1, SIZE, flags=FRESH) as block:
        for i in range(0, SIZE, 4096):
            block[i] = 1
        assert 0.9 * SIZE < memory.own() - before < 1.5 * SIZE


def test_the_peak_remembers_what_was_given_back():
    before = memory.resident()
    with mmap.mmap(-1, SIZE, flags=FRESH) as block:
        for i in range(0, SIZE, 4096):
            block[i] = 1
    assert memory.peak() - before > 0.9 * SIZE
