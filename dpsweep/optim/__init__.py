"""Base optimizers: the last map from a filtered gradient to the next iterate.

All but AdamBC are torch's own. They are fed a released gradient; nothing in this package can see
private data.
"""

from typing import Annotated

from pydantic import Field

from dpsweep.optim import adam, adam_bc, sgd

TOTAL_STEPS = {"sgd": 800.0, "adam": 1.0, "adamw": 1.0, "adambc": 1.0}
"""Default total step by name, from measurement: docs/benchmarks/search.md."""

OptimizerConfig = Annotated[
    sgd.Sgd | adam.Adam | adam.AdamW | adam_bc.AdamBC,
    Field(discriminator="name"),
]
"""Any base optimizer, told apart by `name`."""
