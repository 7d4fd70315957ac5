"""The folder of one trial: its secret and resume state (private), its results (released).

    secret            256 bits; on disk before the first step, gone after the last
    stepped           empty; on disk before the first step, gone after the last
    checkpoint.pt     where to go on from; gone after the last step
    metrics.json      one row per report
    weights.pt        the trained weights
    weights.txt       which those are, if they are not the last iterate
    confusion.json    counts of validation examples by true class and the model's; where those are
                      declared public
    error.txt         traceback of a failure, which may quote private data: stays here

Folders made here are 0700, files 0600. Whoever runs the trial next (after a crash, on another
node) goes on from what lies here, with the same secret. A row is in the checkpoint before it is
anywhere else, so the steps that are repeated are those that nobody has seen the result of.
"""

import contextlib
import csv
import fcntl
import io
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpsweep.core.disk import delete_written, translate_disk_full, write_atomically
from dpsweep.core.errors import StateError
from dpsweep.core.seeds import SECRET_BYTES, Secret
from dpsweep.core.types import Row, Tensors


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of the validation examples of a classification."""

    classes: tuple[str, ...]  # names of the classes, in the order of their numbers
    # examples by true class (rows) and the class that the model gives (columns)
    counts: tuple[tuple[int, ...], ...]

    def to_csv(self) -> str:
        """A line for each true class, a column for each class that the model gives."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["true class", *self.classes])
        rows.writerows([name, *row] for name, row in zip(self.classes, self.counts, strict=True))
        return text.getvalue()


@dataclass(frozen=True)
class TrialDir:
    """The folder at `path`, made on first use."""

    path: Path

    def __post_init__(self) -> None:
        try:
            with translate_disk_full(self.path):
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise StateError(
                f"{self.path}: cannot be written: {e.strerror}. Choose a folder of yours with "
                f"--state or -o"
            ) from e

    def make_secret(self) -> None:
        """Draw the trial's secret, unless it has one; on disk when this returns.

        Raises:
            StateError: If rows were reported under a secret that is gone.
        """
        if self.rows() and not (self.path / "secret").exists():
            raise StateError(
                f"{self.path}: reports were made here with a secret that is gone. Fresh noise "
                f"would release twice what is charged once; train in another folder"
            )
        new = Secret.for_new_trial()
        with contextlib.suppress(FileExistsError):
            write_atomically(self.path / "secret", bytes([new.void]) + new.key, replace=False)

    def secret(self) -> Secret:
        """The trial's secret.

        Raises:
            StateError: If there is none, as it is drawn once, by whoever starts the trial; or if it
                is cut short.
        """
        place = self.path / "secret"
        if not place.exists():
            raise StateError(
                f"{self.path}: the trial's secret is not there. Starting over with fresh noise "
                f"would release twice what is charged once. If this is another node, the state "
                f"folder is not shared with it: put it where every node sees it, with --state"
            )
        stored = place.read_bytes()
        if len(stored) != 1 + SECRET_BYTES or stored[0] not in (0, 1):
            raise StateError(
                f"{place}: is damaged: it has {len(stored)} bytes in place of {1 + SECRET_BYTES}, "
                f"or another form. Noise from what is left of it could be guessed. Put the whole "
                f"file back, or train in another folder"
            )
        return Secret(stored[1:], void=stored[0] == 1)

    @contextlib.contextmanager
    def lock(self, wait_seconds: float = 0.0) -> Iterator[None]:
        """Hold the trial directory for one process.

        Raises:
            StateError: If another process still trains here after `wait_seconds`.
        """
        folder = os.open(self.path, os.O_RDONLY)
        try:
            _acquire_lock(folder, self.path, time.monotonic() + wait_seconds)
            yield
        finally:
            os.close(folder)

    @property
    def is_void(self) -> bool:
        """True if the stored secret is a test's. False if there is none."""
        place = self.path / "secret"
        return place.exists() and place.read_bytes()[:1] == b"\x01"

    def note_first_step(self) -> None:
        """Note that the first step begins; on disk when this returns."""
        write_atomically(self.path / "stepped", b"")

    @property
    def has_stepped(self) -> bool:
        """False if no step has begun here, so that nothing can have been released."""
        return any((self.path / x).exists() for x in ("stepped", "checkpoint.pt", "metrics.json"))

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint, on the CPU; None if there is none."""
        place = self.path / "checkpoint.pt"
        if not place.exists():
            return None
        import torch

        state: dict[str, Any] = torch.load(place, weights_only=True, map_location="cpu")
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint, at once or not at all.

        Raises:
            DiskFull: If there is no space; the old checkpoint is still there.
        """
        write_atomically(self.path / "checkpoint.pt", _serialize(state))

    def save_rows(self, rows: list[Row]) -> None:
        """Replace the table of reports."""
        write_atomically(self.path / "metrics.json", json.dumps(rows).encode())

    def rows(self) -> list[Row]:
        """The table of reports; empty before the first."""
        place = self.path / "metrics.json"
        return json.loads(place.read_text()) if place.exists() else []

    def save_weights(self, params: Tensors, said: str = "") -> None:
        """Store trained weights, a released result, with a description."""
        plain = {k: x.detach().cpu().clone() for k, x in params.items()}
        if said:
            write_atomically(self.path / "weights.txt", f"{said}\n".encode())
        write_atomically(self.weights, _serialize(plain))

    def save_confusion(self, found: ConfusionMatrix) -> None:
        """Store the confusion matrix of the trained weights."""
        write_atomically(self.path / "confusion.json", json.dumps(asdict(found)).encode())

    def confusion(self) -> ConfusionMatrix | None:
        """Read the confusion matrix of the trained weights; None if it was not counted."""
        place = self.path / "confusion.json"
        if not place.exists():
            return None
        stored = json.loads(place.read_text())
        return ConfusionMatrix(tuple(stored["classes"]), tuple(map(tuple, stored["counts"])))

    @property
    def weights(self) -> Path:
        """File of the trained weights, once the trial has ended."""
        return self.path / "weights.pt"

    def note_failure(self, traceback: str) -> Path:
        """Store a traceback, which may quote private data, and return its path."""
        place = self.path / "error.txt"
        write_atomically(place, traceback.encode())
        return place

    def forget(self) -> None:
        """Delete what only an unfinished trial needs: checkpoint, secret, note of a step."""
        for name in ("checkpoint.pt", "secret", "stepped"):  # its note goes last
            delete_written(self.path / name)


def delete_weights_except(folder: Path, numbers: Iterable[int]) -> int:
    """Delete the weights of all trials that ended, except those of `numbers`.

    A trial has ended if its directory holds neither secret nor checkpoint.

    Args:
        folder: Where the trial directories are, each named by its trial's number.
        numbers: Trials whose weights stay.

    Returns:
        Bytes that were freed.
    """
    kept, freed = set(numbers), 0
    for place in folder.glob("*/weights.pt"):
        unfinished = any((place.parent / name).exists() for name in ("secret", "checkpoint.pt"))
        number = place.parent.name
        if unfinished or not number.isdigit() or int(number) in kept:
            continue
        freed += place.stat().st_size
        place.unlink()
    return freed


def _acquire_lock(folder: int, path: Path, until: float) -> None:
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as e:
            if time.monotonic() >= until:
                raise StateError(
                    f"{path}: another process trains here. Name another folder, or end that process"
                ) from e
            time.sleep(0.1)


def _serialize(state: dict[str, Any]) -> bytes:
    """Serialize as torch.save does, in memory: on a full disk torch.save raises no disk error."""
    import torch

    memory = io.BytesIO()
    torch.save(state, memory)
    return memory.getvalue()
