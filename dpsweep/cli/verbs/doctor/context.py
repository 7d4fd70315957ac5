"""Input of the doctor's checks, and the findings that they return."""

from dataclasses import dataclass
from typing import Literal

from dpsweep.core.errors import StateError
from dpsweep.store.state_dir import StateFolder, SweepFolder

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    check: str
    level: Level  # ok; warn: works, but somebody should know; fail: something will not work
    words: str  # what was found
    remedy: str = ""  # what to do; empty where nothing is to be done


@dataclass(frozen=True)
class DoctorContext:
    """State folder, sweeps and servers that the checks look at."""

    state: StateFolder
    storage: str | None  # the storage that was named; None for those of the sweeps
    address: str | None = None  # the Ray cluster that was named; None if there is none
    # the tracking server that was named; None for those of the sweeps
    tracking_uri: str | None = None
    gpu: bool = False  # True to train a small trial on the GPU

    @property
    def sweeps(self) -> list[SweepFolder]:
        """Every sweep of this owner's that can be read, oldest first."""
        return [folder for folder, wrong in self.read() if not wrong]

    def read(self) -> list[tuple[SweepFolder, str]]:
        """Every sweep of this owner's, and why it cannot be read; empty if it can."""
        return [(folder, _fault(folder)) for folder in map(self.state.sweep, self.names())]

    def names(self) -> list[str]:
        """Names of the sweeps; none where the folder is closed, which another check tells."""
        try:
            return self.state.names()
        except PermissionError:
            return []

    @property
    def tracking_uris(self) -> list[str]:
        """The tracking servers to look at, each once."""
        named = [self.tracking_uri, *(folder.tracking_uri for folder in self.sweeps)]
        return list(dict.fromkeys(uri for uri in named if uri))


def _fault(folder: SweepFolder) -> str:
    try:
        folder.read_files()
    except StateError as e:
        return str(e)
    return ""
