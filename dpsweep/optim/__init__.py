"""Base optimizers: the last map from a filtered gradient to the next iterate.

All but AdamBC are torch's own. They are fed a released gradient; nothing in this package can see
private data.
"""

from typing import Annotated

from pydantic import Field

from dpsweep.optim import adam, sgd

OptimizerConfig = Annotated[
    sgd.Sgd | adam.Adam | adam.AdamW | adam.AdamBC, Field(discriminator="name")
]
"""Any base optimizer, told apart by `name`."""
