"""Folders of sweeps on disk: their files, their lease, and the request to stop.

STATE/study.db             Optuna's storage, if no other is named: the truth about every trial
STATE/mlflow.db            tracking, if no server is named;  STATE/artifacts with it
STATE/owner                whose folder it is: the first who launched here
STATE/owners/OWNER/        a folder like this one for each of the others
STATE/sweeps/NAME/         one sweep (0700)
  sweep.json               the sweep as it was launched, its storage, and where it is tracked
  sweep.yaml               the same as one file to launch again
  lock, lease              held by its driver (store/lease.py)
  stop                     there if somebody asked it to stop
  spool.jsonl              events on their way to the tracking server
  trials/0003/             one trial's directory (training/trial_dir.py)
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsweep.config.source import Source, Tree, dump_sweep
from dpsweep.core.disk import (
    delete_written,
    make_private_folder,
    translate_disk_full,
    write_atomically,
)
from dpsweep.core.errors import DiskFull, StateError
from dpsweep.store.lease import (
    LEASE_TIMING,
    Lease,
    LeaseHolder,
    LeaseTiming,
    find_lease_holder,
    hold_lease,
)
from dpsweep.store.owner import (
    VARIABLE,
    get_login_name,
    is_name,
    is_owner,
    split_sweep_name,
    whoami,
)
from dpsweep.tracking.server import is_server, redact_password

DEFAULT, OWNERS = ".dpsweep", "owners"


@dataclass(frozen=True)
class StateFolder:
    """One owner's state folder; nothing is created before a sweep is.

    Several people may name the same folder. It belongs to the first who launched there; each of
    the others has one of the same kind under its `owners`, so that names, files and their modes
    never meet.
    """

    root: Path  # absolute path

    @classmethod
    def at(cls, folder: str | None) -> "StateFolder":
        """This user's part of the folder that was asked for, of DPSWEEP_STATE, or of ./.dpsweep."""
        named = folder or os.environ.get("DPSWEEP_STATE") or DEFAULT
        return cls(Path(named).expanduser().absolute()).of(whoami())

    @property
    def common(self) -> Path:
        """The folder that was named, of which this may be one owner's part."""
        return self.root.parent.parent if self.root.parent.name == OWNERS else self.root

    @property
    def owner(self) -> str | None:
        """Owner of the folder; None if nobody has launched here yet, or only in `owners`."""
        if self.root != self.common:
            return self.root.name
        try:
            return self._read_owner()
        except PermissionError:  # this account may not look into it
            return get_login_name(self.root.stat().st_uid)

    def _read_owner(self) -> str | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            said = (self.root / "owner").read_text().strip()
            if is_owner(said):
                return said
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # older than owners
            return get_login_name((self.root / "sweeps").stat().st_uid)
        return None

    def of(self, owner: str) -> "StateFolder":
        """Another owner's part of the same folder, existing or not."""
        common = StateFolder(self.common)
        first = common.owner
        unclaimed = first is None and not (common.root / OWNERS).exists()
        return common if unclaimed or first == owner else StateFolder(common.root / OWNERS / owner)

    def others(self) -> list["StateFolder"]:
        """The parts of everybody else in the same folder."""
        common = StateFolder(self.common)
        try:
            parts = sorted(p for p in (common.root / OWNERS).glob("*") if is_owner(p.name))
        except PermissionError:
            parts = []
        first = [common] if common.owner is not None else []
        return [part for part in [*first, *map(StateFolder, parts)] if part != self]

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

    def claim(self) -> str:
        """Make the folder this user's, if it is nobody's yet.

        Raises:
            StateError: If it is somebody else's.
        """
        me = whoami()
        if self.root == self.common and not (self.root / "owner").exists():
            if not self.root.exists():
                make_private_folder(self.root)
            with contextlib.suppress(FileExistsError):
                first = f"{self.owner or me}\n".encode()
                write_atomically(self.root / "owner", first, replace=False, mode=0o644)
        if self.owner != me:
            raise StateError(
                f"--state {self.root}: is {self.owner}'s, and you are {me} here ({VARIABLE} says "
                f"otherwise). Try again, or name another folder with --state"
            )
        return me

    def part(self, named: str) -> tuple["StateFolder", str]:
        """Get the state folder of a sweep that is called NAME or OWNER/NAME, and its NAME.

        Raises:
            StateError: If nothing can be called so.
        """
        owner, name = split_sweep_name(named)
        return (self if owner is None else self.of(owner)), name

    def sweep(self, named: str) -> "SweepFolder":
        """The folder of one sweep, existing or not; named as for `part`."""
        state, name = self.part(named)
        return SweepFolder(state.root / "sweeps" / name)

    def names(self) -> list[str]:
        """Every sweep that was launched here, oldest first."""
        found = (self.root / "sweeps").glob("*/sweep.json")
        made = [place for place in found if is_name(place.parent.name)]
        return [place.parent.name for place in sorted(made, key=lambda p: p.stat().st_mtime)]

    def check_writable(self) -> None:
        """Raise StateError if the folder could not be written, and create nothing."""
        place = self.check_folder()
        if not os.access(place, os.W_OK | os.X_OK):
            raise self._misplaced(f"{place} is not writable")

    def check_folder(self) -> Path:
        """Return the folder, or the innermost around it that exists.

        Raises:
            StateError: If that is a file.
        """
        place = self.root
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            raise self._misplaced(f"{place} is not a folder")
        return place

    def _misplaced(self, what: str) -> StateError:
        return StateError(
            f"--state {self.root}: {what}. Name a folder of yours with --state FOLDER"
        )


@dataclass(frozen=True)
class SweepFolder:
    """One sweep's folder."""

    path: Path

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.path.name

    @property
    def state(self) -> StateFolder:
        """The state folder it is in."""
        return StateFolder(self.path.parent.parent)

    @property
    def exists(self) -> bool:
        """True once the sweep was launched."""
        return os.path.exists(self.path / "sweep.json")  # no error if forbidden

    def create(
        self,
        sweep: Source,
        base: Source,
        tracking_uri: str | None,
        storage_uri: str | None = None,
        study: str | None = None,
    ) -> None:
        """Make the folder and write down the sweep, its storage and where it is tracked.

        Args:
            sweep: The sweep file.
            tracking_uri: The tracking server; None for a database in the state folder.
            storage_uri: The storage; None for a file in the state folder.
            study: The study's name there, if not the sweep's.

        Raises:
            StateError: If the name is taken.
            DiskFull: If there is no space; nothing of the sweep is left behind.
        """
        owner = self.state.claim()
        try:
            make_private_folder(self.path)
        except FileExistsError as e:
            raise self.make_name_taken_error() from e
        try:
            with translate_disk_full(self.path):
                self._write_sweep(sweep, base)
                (self.path / "trials").mkdir(mode=0o700)
                for own, server in (("study.db", storage_uri), ("mlflow.db", tracking_uri)):
                    if server is None:
                        (self.state.root / own).touch(mode=0o600)
                self._store(
                    {
                        "id": uuid.uuid4().hex,
                        "owner": owner,
                        "study": study or self.name,
                        "sources": _dump_sources(sweep, base),
                        "tracking_uri": tracking_uri,
                        "storage_uri": storage_uri,
                    }
                )
        except DiskFull:
            self.remove()
            raise

    def _store(self, stored: Tree) -> None:
        """Replace sweep.json, at once or not at all; only its owner can read it."""
        text = json.dumps(stored, indent=1)  # the URIs may hold passwords
        write_atomically(self.path / "sweep.json", text.encode())

    def move_storage(self, storage_uri: str) -> None:
        """Write down that the study is now in another storage."""
        self._store({**self._read(), "storage_uri": storage_uri})

    def accept(self, sweep: Source, base: Source) -> None:
        """Write down that the sweep goes on by another file."""
        self._write_sweep(sweep, base)
        self._store({**self._read(), "sources": _dump_sources(sweep, base)})

    def data_key(self) -> bytes:
        """The sweep's secret key of its data's fingerprint; drawn if there is none yet."""
        place = self.path / "data.key"
        if not place.exists():
            write_atomically(place, os.urandom(32))
        return place.read_bytes()

    def has_data(self, fingerprint: str) -> bool:
        """True if the sweep was launched with these data, or it is not known with which.

        Args:
            fingerprint: Under the key `data_key`.
        """
        return self._read().get("keyed_fingerprint") in (None, fingerprint)

    def check_data(self, fingerprint: str) -> None:
        """Note which data the sweep is about, the first time; compare them from then on.

        Args:
            fingerprint: Under the key `data_key`.

        Raises:
            StateError: If they are others than before.
        """
        stored = self._read()
        stored.pop("fingerprint", None)  # of a version that had no key
        known = stored.get("keyed_fingerprint")
        if known is None:
            self._store({**stored, "keyed_fingerprint": fingerprint})
        elif known != fingerprint:
            raise StateError(
                f"sweep {self.name!r}: the data are not those it was launched with: trials on both "
                f"could not be compared, and each has its own privacy to lose. Put the former data "
                f"back, or launch a sweep of its own with --set name={self.name}-2"
            )

    def _write_sweep(self, sweep: Source, base: Source) -> None:
        """The sweep as one file that can be launched again, for people and for tracking."""
        (self.path / "sweep.yaml").write_text(dump_sweep(sweep, base.tree), encoding="utf-8")

    def make_name_taken_error(self) -> StateError:
        """The error for launching a second sweep of this name."""
        return StateError(
            f"name: a sweep called {self.name!r} is already in {self.path.parent.parent}. See it "
            f"with: dpsweep status {self.name}; go on with: dpsweep resume {self.name}; or launch "
            f"under another name with --name {self.name}-2"
        )

    def read_files(self) -> tuple[Source, Source]:
        """The sweep and its base as they were launched; StateError if there is no such sweep."""
        sweep, base = self._read()["sources"]
        return Source(sweep["name"], sweep["tree"], {}), Source(base["name"], base["tree"], {})

    @property
    def id(self) -> str:
        """Tells this sweep from another of the same name on one tracking server."""
        return str(self._read()["id"])

    @property
    def owner_name(self) -> str:
        """User who launched it; the folder's owner, if it was launched before owners were noted."""
        return str(self._read().get("owner") or self.state.owner)

    @property
    def study(self) -> str:
        """Name of its study in the storage."""
        return str(self._read().get("study") or self.name)

    @property
    def called(self) -> str:
        """Name that the user types: NAME, or OWNER/NAME for everybody else's sweeps."""
        state = self.state
        return self.name if state == state.of(whoami()) else f"{self.owner_name}/{self.name}"

    @property
    def tracking_uri(self) -> str | None:
        """The tracking server the sweep was launched with; None if it has none."""
        uri: str | None = self._read()["tracking_uri"]
        return uri

    @property
    def storage_uri(self) -> str:
        """The storage of the sweep's study."""
        named: str | None = self._read().get("storage_uri")
        return named or self.state.storage_uri

    def check_mine(self, *, force: bool) -> None:
        """Refuse to touch another owner's sweep, unless it is called by its full name and forced.

        Raises:
            StateError: Naming the owner.
        """
        self._read()
        if self.called != self.name and not force:
            raise StateError(
                f"sweep {self.called!r} is {self.owner_name}'s, not yours ({whoami()}). If they "
                "know, "
                f"add --force; if you are {self.owner_name} under another name, set {VARIABLE}"
            )

    def _read(self) -> Tree:
        """sweep.json, as far as anything is built on it.

        Raises:
            StateError: If there is none, or it is not one of ours.
        """
        place = self.path / "sweep.json"
        try:
            return _read_stored(place, self.name)
        except (FileNotFoundError, NotADirectoryError) as e:
            raise self._make_not_found_error() from e
        except PermissionError as e:
            raise StateError(
                f"sweep {self.name!r}: {place} is {self.state.owner}'s "
                f"alone: {e.strerror}. Ask them, or work under that account"
            ) from e

    def _make_not_found_error(self) -> StateError:
        state = self.state
        known = ", ".join(state.names()) or "none"
        theirs = [
            f"{other.owner}/{self.name}"
            for other in state.others()
            if other.sweep(self.name).exists
        ]
        whose = f" Of this name there is {', '.join(theirs)}." if theirs else ""
        return StateError(
            f"no sweep called {self.name!r} in {state.root}. Known: {known}.{whose} Another state "
            f"folder is named with --state FOLDER"
        )

    def trial_dir(self, number: int) -> Path:
        """Get the directory of a trial."""
        return self.path / "trials" / f"{number:04d}"

    @contextlib.contextmanager
    def lease(self, pace: LeaseTiming = LEASE_TIMING, wait_seconds: float = 0.0) -> Iterator[Lease]:
        """Hold the sweep for this process. The system frees it when the process dies.

        Args:
            wait_seconds: How long to wait for another driver.

        Raises:
            StateError: If another driver holds it.
        """
        with hold_lease(self.path, pace, wait_seconds) as lease:
            self.stop_request.unlink(missing_ok=True)
            yield lease

    def owner(self) -> LeaseHolder | None:
        """Find the process that drives the sweep now; None if none does."""
        return find_lease_holder(self.path)

    @property
    def stop_request(self) -> Path:
        """A file whose presence asks the driver to stop."""
        return self.path / "stop"

    def note_dashboard(self, address: str | None) -> None:
        """Note the dashboard of the cluster that the sweep runs on; None if that has none."""
        if address is None:
            delete_written(self.path / "dashboard")
        else:
            write_atomically(self.path / "dashboard", address.encode())

    def links(self) -> dict[str, str]:
        """Addresses to look at: MLflow, if a server is named, and Ray's while the sweep runs."""
        place, uri = self.path / "dashboard", self.tracking_uri
        found = {"MLflow": redact_password(uri)} if uri and is_server(uri) else {}
        if place.exists() and self.owner():
            found["Ray"] = place.read_text()
        return found

    def remove(self) -> None:
        """Undo `create`."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Delete what only Ray needed."""
        shutil.rmtree(self.path / "ray", ignore_errors=True)


def _dump_sources(*files: Source) -> list[Tree]:
    """Files as they are written down: without the lines, which only errors before a launch name."""
    return [{"name": source.name, "tree": source.tree} for source in files]


def _read_stored(place: Path, name: str) -> Tree:
    """A sweep.json, as far as anything is built on it.

    Raises:
        StateError: If it is not one of ours.
        OSError: If it cannot be read.
    """
    try:
        stored = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise _make_damaged_error(place, "is no JSON") from e
    if wrong := _find_fault(stored, name):
        raise _make_damaged_error(place, wrong)
    return dict(stored)


def _find_fault(stored: Any, name: str) -> str:
    """Describe what is wrong with the content of a sweep.json; empty if nothing is."""
    if not isinstance(stored, dict):
        return "holds no mapping"
    texts = ("id", "owner", "study", "tracking_uri", "storage_uri")
    if wrong := [key for key in texts if not isinstance(stored.get(key), str | None)]:
        return f"{wrong[0]} must be text"
    if not stored.get("id") or "tracking_uri" not in stored:
        return "id or tracking_uri is missing"
    sources = stored.get("sources")
    if not isinstance(sources, list) or len(sources) != 2 or not all(map(_is_source, sources)):
        return "sources must be a sweep and its base"
    if sources[0]["tree"].get("name") != name:
        return f"is of another sweep than {name!r}, whose folder it is in"
    return ""


def _is_source(stored: Any) -> bool:
    return (
        isinstance(stored, dict)
        and isinstance(stored.get("name"), str)
        and isinstance(stored.get("tree"), dict)
    )


def _make_damaged_error(place: Path, wrong: str) -> StateError:
    return StateError(
        f"{place}: {wrong}; it was not written by dpsweep, or is damaged. Put it back from a "
        f"backup; sweep.yaml beside it may still be whole, and can be launched anew"
    )
