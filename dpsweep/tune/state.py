"""Where a sweep lives on disk, who may drive it, and how it is asked to stop.

STATE/study.db             Optuna's storage, if no other is named: the truth about every trial
STATE/mlflow.db            tracking, if no server is named;  STATE/artifacts with it
STATE/sweeps/NAME/         one sweep (0700)
  sweep.json               the sweep as it was launched, its storage, and where it is tracked
  sweep.yaml               the same as one file to launch again
  lock, lease              held by its driver (tune/lease.py)
  stop                     there if somebody asked it to stop
  spool.jsonl              events on their way to the tracking server
  trials/0003/             one trial's room (train/room.py)
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from dpsweep.config.load import Source, Tree
from dpsweep.core.disk import room_on_disk, write_whole
from dpsweep.core.errors import DiskFull, StateError
from dpsweep.tune.lease import PACE, Lease, Owner, Pace, held, owner_of

DEFAULT = ".dpsweep"


@dataclass(frozen=True)
class State:
    """The state folder; nothing is created before a sweep is.

    Attributes:
        root: Absolute path.
    """

    root: Path

    @classmethod
    def at(cls, folder: str | None) -> "State":
        """The folder that was asked for, DPSWEEP_STATE, or ./.dpsweep."""
        named = folder or os.environ.get("DPSWEEP_STATE") or DEFAULT
        return cls(Path(named).expanduser().absolute())

    @property
    def storage_uri(self) -> str:
        """Optuna's storage, for sweeps that were launched without another."""
        return f"sqlite:///{self.root / 'study.db'}"

    @property
    def tracking_uri(self) -> str:
        """MLflow's database, used if no server is named."""
        return f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def artifacts(self) -> Path:
        """MLflow's artifacts, used if no server is named."""
        return self.root / "artifacts"

    def sweep(self, name: str) -> "SweepFolder":
        """The folder of one sweep, existing or not."""
        return SweepFolder(self.root / "sweeps" / name)

    def names(self) -> list[str]:
        """Every sweep that was launched here, oldest first."""
        made = list((self.root / "sweeps").glob("*/sweep.json"))
        return [place.parent.name for place in sorted(made, key=lambda p: p.stat().st_mtime)]

    def check_writable(self) -> None:
        """Raises StateError if the folder could not be written, and creates nothing."""
        place = self.root
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            what = "is not a folder" if not place.is_dir() else "is not writable"
            raise StateError(
                f"--state {self.root}: {place} {what}. Name a folder of yours with --state FOLDER"
            )


@dataclass(frozen=True)
class SweepFolder:
    """One sweep's folder.

    Attributes:
        path: The folder.
    """

    path: Path

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.path.name

    @property
    def exists(self) -> bool:
        """True once the sweep was launched."""
        return (self.path / "sweep.json").exists()

    def create(
        self,
        sweep: Source,
        base: Source,
        tracking_uri: str | None,
        storage_uri: str | None = None,
    ) -> None:
        """Makes the folder and writes down the sweep, its storage and where it is tracked.

        Raises:
            StateError: If the name is taken.
            DiskFull: If there is no room; nothing is left behind.
        """
        try:
            self.path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, parents=True)
        except FileExistsError as e:
            raise self.taken() from e
        stored: Tree = {
            "id": uuid.uuid4().hex,
            "sources": _sources(sweep, base),
            "tracking_uri": tracking_uri,
            "storage_uri": storage_uri,
        }
        try:
            with room_on_disk(self.path):
                self._write_sweep(sweep, base)
                (self.path / "trials").mkdir(mode=0o700)
                self._store(stored)
        except DiskFull:
            self.remove()
            raise

    def _store(self, stored: Tree) -> None:
        """Replaces sweep.json, at once or not at all; only its owner can read it."""
        text = json.dumps(stored, indent=1)  # the URIs may hold passwords
        write_whole(self.path / "sweep.json", text.encode())

    def move_storage(self, storage_uri: str) -> None:
        """Writes down that the study is now in another storage."""
        self._store({**self._read(), "storage_uri": storage_uri})

    def accept(self, sweep: Source, base: Source) -> None:
        """Writes down that the sweep goes on by another file."""
        self._write_sweep(sweep, base)
        self._store({**self._read(), "sources": _sources(sweep, base)})

    def check_data(self, fingerprint: str) -> None:
        """Notes which data the sweep is about, the first time; compares them from then on.

        Raises:
            StateError: If they are others than before.
        """
        known = self._read().get("fingerprint")
        if known is None:
            self._store({**self._read(), "fingerprint": fingerprint})
        elif known != fingerprint:
            raise StateError(
                f"sweep {self.name!r}: the data are not those it was launched with: trials on both "
                f"could not be compared, and each has its own privacy to lose. Put the former data "
                f"back, or launch a sweep of its own with --set name={self.name}-2"
            )

    def _write_sweep(self, sweep: Source, base: Source) -> None:
        """The sweep as one file that can be launched again, for people and for tracking."""
        text = yaml.safe_dump(
            {**sweep.tree, "base": base.tree}, sort_keys=False, default_flow_style=None
        )
        (self.path / "sweep.yaml").write_text(text, encoding="utf-8")

    def taken(self) -> StateError:
        """The error for launching a second sweep of this name."""
        return StateError(
            f"name: a sweep called {self.name!r} is already in {self.path.parent.parent}. See it "
            f"with: dpsweep status {self.name}; go on with: dpsweep resume {self.name}; or launch "
            f"under another name with --name {self.name}-2"
        )

    def stored(self) -> tuple[Source, Source]:
        """The sweep and its base as they were launched.

        Raises:
            StateError: If there is no such sweep.
        """
        sweep, base = self._read()["sources"]
        return Source(sweep["name"], sweep["tree"], {}), Source(base["name"], base["tree"], {})

    @property
    def id(self) -> str:
        """Tells this sweep from another of the same name on one tracking server."""
        return str(self._read()["id"])

    @property
    def tracking_uri(self) -> str | None:
        """The tracking server the sweep was launched with; None if it has none."""
        uri: str | None = self._read()["tracking_uri"]
        return uri

    @property
    def storage_uri(self) -> str:
        """The storage of the sweep's study."""
        named: str | None = self._read().get("storage_uri")
        return named or State(self.path.parent.parent).storage_uri

    def _read(self) -> Tree:
        if not self.exists:
            state = State(self.path.parent.parent)
            known = ", ".join(state.names()) or "none"
            raise StateError(
                f"no sweep called {self.name!r} in {state.root}. Known: {known}. Another state "
                f"folder is named with --state FOLDER"
            )
        stored: Tree = json.loads((self.path / "sweep.json").read_text())
        return stored

    def room(self, number: int) -> Path:
        """Where a trial lives."""
        return self.path / "trials" / f"{number:04d}"

    @contextlib.contextmanager
    def lease(self, pace: Pace = PACE) -> Iterator[Lease]:
        """Holds the sweep for this process. The system frees it when the process dies.

        Raises:
            StateError: If another driver holds it.
        """
        with held(self.path, pace) as lease:
            self.stop_request.unlink(missing_ok=True)
            yield lease

    def owner(self) -> Owner | None:
        """Who drives the sweep now; None if nobody does."""
        return owner_of(self.path)

    @property
    def stop_request(self) -> Path:
        """A file whose presence asks the driver to stop."""
        return self.path / "stop"

    def remove(self) -> None:
        """Undoes `create`."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Deletes what only Ray needed."""
        shutil.rmtree(self.path / "ray", ignore_errors=True)


def _sources(*sources: Source) -> list[Tree]:
    """Files as they are written down: without the lines, which only errors before a launch name."""
    return [{"name": source.name, "tree": source.tree} for source in sources]
