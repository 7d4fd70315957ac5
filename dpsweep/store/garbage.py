"""Files that killed processes left in a state folder, and their removal.

Nothing of a sweep that is being driven is listed, and before anything of a sweep is removed its
lease is taken, so that no driver can start meanwhile. Results are never leftovers: a folder whose
trials have reported stays, whatever became of its study.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import optuna

from dpsweep.core.errors import DpSweepError, StateError
from dpsweep.store.lease import hold_lease
from dpsweep.store.state_dir import StateFolder, SweepFolder
from dpsweep.store.storage import list_study_names, open_storage
from dpsweep.store.study import open_study
from dpsweep.tracking.spool import Spool, read_backlog
from dpsweep.training.trial_dir import TrialDir

_WRITTEN = (
    "checkpoint.pt|metrics.json|weights.pt|confusion.json|error.txt|secret|sweep.json|lease|"
    "selection.json"
)
_TEMPORARY = re.compile(rf"\.({_WRITTEN})\.[a-z0-9_]{{8}}")
_YOUNG_SECONDS = 60.0
"""A folder without a study may be that of a launch that is just making it."""


@dataclass(frozen=True)
class Leftover:
    """Something that nobody needs any more."""

    kind: str  # what it is
    place: str  # where it is
    size_bytes: int  # what removing it frees, about
    sweep: SweepFolder | None  # the sweep it belongs to; None for those of none
    # removes it. To be called with the sweep's lease held
    delete: Callable[[], object] = field(repr=False, compare=False)


def find_leftovers(state: StateFolder) -> list[Leftover]:
    """Find what can be removed, sweep by sweep; changes nothing."""
    found, known = list[Leftover](), _StudyNames(state)
    for place in sorted((state.root / "sweeps").glob("*")):
        folder = SweepFolder(place)
        if place.is_dir() and folder.owner() is None:
            found += _find_sweep_leftovers(folder, known)
    return [*found, *_find_orphan_studies(known)]


def remove_leftovers(found: list[Leftover]) -> list[Leftover]:
    """Remove leftovers; return those that went. What is in use by now stays."""
    gone = []
    for one in found:
        with contextlib.suppress(StateError), _hold_sweep(one.sweep):
            one.delete()
            gone.append(one)
    return gone


def folder_bytes(place: Path) -> int:
    """Size of a file or of all files under a folder."""
    files = [place] if place.is_file() else place.rglob("*")
    return sum(f.lstat().st_size for f in files if f.is_symlink() or f.is_file())


def make_leftover(kind: str, place: Path, sweep: SweepFolder | None = None) -> Leftover:
    """A file or folder that can go as a whole."""

    def delete() -> None:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)

    return Leftover(kind, str(place), folder_bytes(place), sweep, delete)


@contextlib.contextmanager
def _hold_sweep(folder: SweepFolder | None) -> Iterator[None]:
    """Hold the sweep, if there is one, so that nobody drives it meanwhile.

    Raises:
        StateError: If somebody does.
    """
    if folder is None:
        yield
    elif folder.path.exists():
        with hold_lease(folder.path):
            yield


class _StudyNames:
    """Names of the studies in each storage, asked for once."""

    def __init__(self, state: StateFolder) -> None:
        self.state = state
        self._names: dict[str, list[str] | None] = {}

    def studies(self, uri: str) -> list[str] | None:
        """None if the storage does not answer."""
        if uri not in self._names:
            try:
                self._names[uri] = (
                    self._list_own() if uri == self.state.storage_uri else list_study_names(uri)
                )
            except DpSweepError:
                self._names[uri] = None
        return self._names[uri]

    def _list_own(self) -> list[str]:
        """Looking does not make the file."""
        uri = self.state.storage_uri
        return list_study_names(uri) if (self.state.root / "study.db").exists() else []


def _find_sweep_leftovers(folder: SweepFolder, known: _StudyNames) -> Iterator[Leftover]:
    studies: list[str] | None = []
    study = folder.name
    if folder.exists:
        try:
            studies, study = known.studies(folder.storage_uri), folder.study
        except StateError:  # nobody knows what a folder with a damaged sweep.json holds
            return
    if studies is not None and study not in studies:
        young = time.time() - folder.path.stat().st_mtime < _YOUNG_SECONDS
        if not young and not any(folder.path.glob("trials/*/metrics.json")):
            yield make_leftover("folder without a study", folder.path, folder)
        return
    if studies:
        yield from _find_trial_leftovers(folder, known.state)
    for place in sorted(folder.path.rglob(".*")):
        if _TEMPORARY.fullmatch(place.name) and not _is_busy(place.parent):
            yield make_leftover("file of a killed writer", place, folder)
    if (folder.path / "ray").exists():
        yield make_leftover("Ray's folder", folder.path / "ray", folder)
    spool = read_backlog(folder.path)
    if spool.delivered_bytes and not spool.waiting:
        yield Leftover(
            "delivered spool",
            str(folder.path / "spool.jsonl"),
            spool.delivered_bytes,
            folder,
            lambda: Spool(folder.path).truncate_delivered(),
        )


def _find_trial_leftovers(folder: SweepFolder, state: StateFolder) -> Iterator[Leftover]:
    """Secrets and checkpoints of trials that ended."""
    try:
        records = open_study(folder.name, state).records()
    except DpSweepError:
        return
    for record in records:
        place = folder.path / "trials" / f"{record.number:04d}"
        held_back = [place / name for name in ("secret", "checkpoint.pt")]
        size = sum(file.stat().st_size for file in held_back if file.exists())
        if record.state != "running" and size and not _is_busy(place):
            yield Leftover(
                "resume state of an ended trial", str(place), size, folder, TrialDir(place).forget
            )


def _find_orphan_studies(known: _StudyNames) -> Iterator[Leftover]:
    """Studies in the state folder's own file whose sweeps' folders are gone."""
    state = known.state
    for name in known.studies(state.storage_uri) or []:
        if not state.sweep(name).path.exists():
            yield Leftover(
                "study without a folder",
                f"{name} in {state.root / 'study.db'}",
                0,
                None,
                partial(_delete_study, state, name),
            )


def _delete_study(state: StateFolder, name: str) -> None:
    if not state.sweep(name).path.exists():
        optuna.delete_study(study_name=name, storage=open_storage(state.storage_uri))


def _is_busy(place: Path) -> bool:
    """True if a worker still trains in this directory: it may outlive its driver on a cluster."""
    try:
        with TrialDir(place).lock():
            return False
    except StateError:
        return True
