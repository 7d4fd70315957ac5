"""What several models are built of, and what they refuse."""

from torch import nn

from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.errors import Misfit

Shape = tuple[int, int, int]
"""(channels, height, width) of an image."""


def linear(inputs: int, outputs: int, block: int | None, key: str = "block") -> nn.Module:
    """A linear layer: of circulant blocks, or dense if `block` is None.

    Raises:
        Misfit: Naming `key`, if the block does not divide both sizes.
    """
    if block is None:
        return nn.Linear(inputs, outputs)
    try:
        return CirculantLinear(inputs, outputs, block)
    except ValueError as e:
        raise Misfit(key, str(e).replace("CirculantLinear.block", key)) from e


def refuse_smaller(shape: Shape, halvings: int) -> None:
    """Raises ValueError if halving the sides of `shape` that often leaves no pixel."""
    _, height, width = shape
    least = 2**halvings
    if min(height, width) < least:
        raise ValueError(
            f"each side is halved {halvings} times, which takes images of at least {least} x "
            f"{least} pixels, got {height} x {width}. Choose another model or data set"
        )
