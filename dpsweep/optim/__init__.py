"""Base optimizers: the last map from a filtered gradient to the next iterate.

They are torch's own, fed a released gradient; nothing in this room can see private data.
"""

from typing import Annotated

from pydantic import Field

from dpsweep.optim import adam, sgd

OptimizerConfig = Annotated[
    sgd.Sgd | adam.Adam | adam.AdamW,
    Field(discriminator="name"),
]
"""Any base optimizer, told apart by `name`."""
