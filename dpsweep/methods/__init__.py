"""The table of methods: every one, by the name a sweep file uses.

To add a method, write its module beside this file, and add it to METHODS and MethodConfig.
Nothing is registered on import elsewhere, so this table is the whole truth on every Ray worker.
"""

from functools import cache
from typing import Annotated, Any

from pydantic import Field

from dpsweep.methods import (
    bandmf,
    block_spectral_dp,
    compose,
    disk,
    doppler,
    dp_adam,
    dp_adambc,
    dp_ftrl,
    dp_pmlf,
    dp_sgd,
    fftkf,
    innerouter,
    spectral_dp,
)
from dpsweep.methods.base import Entry, Method
from dpsweep.privacy.correlated import INDEPENDENT

_SGD = ("sgd",)
_ANY = ("sgd", "adam", "adamw", "adambc")
_LAYERS = "per_layer"

METHODS: dict[str, Entry] = {
    "dp_sgd": Entry.of(dp_sgd, _SGD, "arXiv:1607.00133"),
    "dp_adam": Entry.of(dp_adam, ("adam", "adamw"), "arXiv:1607.00133"),
    "dp_adambc": Entry.of(dp_adambc, ("adambc",), "arXiv:2312.14334"),
    "doppler": Entry.of(doppler, _ANY, "arXiv:2408.13460"),
    "disk": Entry.of(disk, _ANY, "arXiv:2410.03883"),
    "fftkf": Entry.of(fftkf, _ANY, "Shin et al., FFTKF"),
    "innerouter": Entry.of(innerouter, _ANY, "Xiao et al. 2023"),
    "dp_pmlf": Entry.of(dp_pmlf, _ANY, "DP-PMLF"),
    "spectral_dp": Entry.of(spectral_dp, _ANY, "Feng et al. 2023", _LAYERS),
    "block_spectral_dp": Entry.of(block_spectral_dp, _ANY, "Feng et al. 2023", _LAYERS),
    "bandmf": Entry.of(bandmf, _ANY, "arXiv:2306.08153"),
    "dp_ftrl": Entry.of(dp_ftrl, _ANY, "arXiv:2408.08868"),
    "compose": Entry.of(compose, _ANY, ""),
}

PUBLISHED = tuple(name for name, entry in METHODS.items() if entry.paper)
"""The methods of the papers, without the one you put together yourself."""

MethodConfig = Annotated[
    dp_sgd.Config
    | dp_adam.Config
    | dp_adambc.Config
    | doppler.Config
    | disk.Config
    | fftkf.Config
    | innerouter.Config
    | dp_pmlf.Config
    | spectral_dp.Config
    | block_spectral_dp.Config
    | bandmf.Config
    | dp_ftrl.Config
    | compose.Config,
    Field(discriminator="name"),
]
"""Any method's tunables, told apart by `name`."""


def may_correlate(section: Any) -> bool:
    """True if a trial whose file has this `method` may have correlated noise."""
    match section:
        case {"compose": {"noise": _}}:
            return True
        case {"name": str(name)} if name in METHODS:
            return _correlates(name)
    return False


@cache  # asked of every point that a space is looked at in
def _correlates(name: str) -> bool:
    entry = METHODS[name]
    return entry.build(entry.config()).noise != INDEPENDENT


def build_method(config: MethodConfig) -> Method:
    """The method a config describes."""
    return METHODS[config.name].build(config)
