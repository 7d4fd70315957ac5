"""Records of the sweeps that this machine sent to clusters: STATE/submitted/NAME.json (0600).

Kept are the cluster's address, the state folder there and whose the sweep is. No secret is.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dpsweep.core.disk import write_atomically
from dpsweep.core.errors import StateError
from dpsweep.store.state_dir import StateFolder


@dataclass(frozen=True)
class Submitted:
    """A sweep that runs elsewhere."""

    name: str  # the sweep's
    address: str  # of the cluster, as for `submit --to`
    state: str | None  # state folder there; None for what DPSWEEP_STATE says there
    owner: str  # whose sweep it is there

    @property
    def job_prefix(self) -> str:
        """With a number behind it: the submission ids of the jobs that drove it.

        Neither owners nor names hold a `~`, so no two sweeps share one.
        """
        return f"dpsweep-{self.owner}~{self.name}~"

    def remember(self, here: StateFolder) -> None:
        """Write it down."""
        place = _folder(here) / f"{self.name}.json"
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(place, json.dumps(asdict(self), indent=1).encode())


def read_submitted(name: str, here: StateFolder) -> Submitted | None:
    """Read the record of a submitted sweep; None if none of that name was sent from here."""
    place = _folder(here) / f"{name}.json"
    try:
        if "/" in name or not place.is_file():
            return None
    except OSError:  # a name too long for a file
        return None
    try:
        return Submitted(**json.loads(place.read_text()))
    except (ValueError, TypeError) as e:
        raise StateError(f"{place}: cannot be read ({e}). Delete it, and submit again") from e


def all_remembered(here: StateFolder) -> list[Submitted]:
    """All of them, by name."""
    found = (read_submitted(place.stem, here) for place in sorted(_folder(here).glob("*.json")))
    return [one for one in found if one]


def check_free(name: str, address: str, state: str | None, here: StateFolder) -> None:
    """Raise StateError if a verb could not tell which sweep of that name is meant."""
    if here.sweep(name).exists:
        raise StateError(
            f"name: a sweep called {name!r} is already on this machine, in {here.root}. Submit "
            f"under another name with --name {name}-2"
        )
    known = read_submitted(name, here)
    if known and known.address == address and known.state != state:
        raise StateError(
            f"name: {name!r} was submitted to {address} with state folder "
            f"{known.state or 'of the cluster (DPSWEEP_STATE)'}, not {state or 'that'}. Submit "
            f"under another name with --name {name}-2"
        )
    if known and known.address != address:
        raise StateError(
            f"name: {name!r} was submitted to {known.address}. Submit under another name with "
            f"--name {name}-2; or, if the same cluster is now at {address}, go on there with: "
            f"dpsweep resume {name} --address {address}; or, if it is gone for ever, delete "
            f"{_folder(here) / name}.json"
        )


def _folder(here: StateFolder) -> Path:
    return here.root / "submitted"
