"""Keeps memory that a step frees for the next step.

glibc gives large blocks back to the system as soon as they are free, and the next step's first
touch of each page is then a page fault. A training step frees and asks for the same blocks over
and over; on virtual machines this was a third of its time.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_THRESHOLD = 32 * 2**20  # glibc takes no more
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Set the allocator of this process; False where it is not glibc's, and nothing is done."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return bool(kept)
