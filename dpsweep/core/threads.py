"""torch's CPU threads: how many, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_threads(num: int) -> Iterator[int]:
    """Set the number of torch's threads within this context, and yield the number before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield before
    finally:
        torch.set_num_threads(before)
