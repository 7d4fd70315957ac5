"""The folder of one trial: its secret and resume state (private), its results (released).

    secret            256 bits; on disk before the first step, gone after the last
    checkpoint.pt     where to go on from; gone after the last step
    metrics.json      one row per report
    weights.pt        the trained weights
    error.txt         traceback of a failure, which may quote private data: stays here

Folder 0700, files 0600. Whoever runs the trial next (after a crash, on another node) goes on
from what lies here, with the same secret: the steps it repeats release nothing new.
"""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from dpsweep.core.errors import StateError
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Row, Tensors


@dataclass(frozen=True)
class Room:
    """The folder at `path`, made on first use.

    Attributes:
        path: The folder.
    """

    path: Path

    def __post_init__(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise StateError(
                f"{self.path}: cannot be written: {e.strerror}. Choose a folder of yours with "
                f"--state or -o"
            ) from e

    def secret(self) -> Secret:
        """The trial's secret: the stored one, or a new one that is on disk when this returns."""
        place = self.path / "secret"
        if not place.exists():
            new = Secret.for_new_trial()
            _write(place, lambda file: file.write(bytes([new.void]) + new.key))
        stored = place.read_bytes()
        return Secret(stored[1:], void=bool(stored[0]))

    @property
    def is_void(self) -> bool:
        """True if the stored secret is a test's. False if there is none."""
        place = self.path / "secret"
        return place.exists() and place.read_bytes()[0] == 1

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint, on the CPU; None if there is none."""
        place = self.path / "checkpoint.pt"
        if not place.exists():
            return None
        state: dict[str, Any] = torch.load(place, weights_only=True, map_location="cpu")
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint, at once or not at all."""
        _write(self.path / "checkpoint.pt", lambda file: torch.save(state, file))

    def save_rows(self, rows: list[Row]) -> None:
        """Replaces the table of reports."""
        text = json.dumps(rows).encode()
        _write(self.path / "metrics.json", lambda file: file.write(text))

    def rows(self) -> list[Row]:
        """The table of reports; empty before the first."""
        place = self.path / "metrics.json"
        return json.loads(place.read_text()) if place.exists() else []

    def save_weights(self, params: Tensors) -> None:
        """Stores trained weights, a released result."""
        plain = {k: x.detach().cpu().clone() for k, x in params.items()}
        _write(self.weights, lambda file: torch.save(plain, file))

    @property
    def weights(self) -> Path:
        """Where the trained weights lie once the trial is through."""
        return self.path / "weights.pt"

    def note_failure(self, traceback: str) -> Path:
        """Stores a traceback, which may quote private data, and says where."""
        place = self.path / "error.txt"
        _write(place, lambda file: file.write(traceback.encode()))
        return place

    def forget(self) -> None:
        """Deletes what only an unfinished trial needs: checkpoint and secret."""
        for name in ("checkpoint.pt", "secret"):
            (self.path / name).unlink(missing_ok=True)


def _write(place: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """A file that is there whole and durable, or not at all, and only its owner can read."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, place)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(place.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
