"""The table of methods: every one, by the name a sweep file uses.

To add a method, write its module beside this file and one line here. Nothing is
registered on import elsewhere, so this table is the whole truth on every Ray worker.
"""

from typing import Annotated

from pydantic import Field

from dpsweep.methods import disk, dp_adam, dp_sgd, fftkf
from dpsweep.methods.base import Entry, Method

ANY_BASE = ("sgd", "adam", "adamw")

METHODS: dict[str, Entry] = {
    "dp_sgd": Entry(dp_sgd.Config, dp_sgd.build, ("sgd",), paper="arXiv:1607.00133"),
    "dp_adam": Entry(dp_adam.Config, dp_adam.build, ("adam", "adamw"), paper="arXiv:1607.00133"),
    "disk": Entry(disk.Config, disk.build, ANY_BASE, paper="arXiv:2410.03883"),
    "fftkf": Entry(fftkf.Config, fftkf.build, ANY_BASE, paper="Shin et al., FFTKF"),
}

MethodConfig = Annotated[
    dp_sgd.Config | dp_adam.Config | disk.Config | fftkf.Config,
    Field(discriminator="name"),
]
"""Any method's tunables, told apart by `name`."""


def build(config: MethodConfig) -> Method:
    """The method a config describes."""
    return METHODS[config.name].build(config)
