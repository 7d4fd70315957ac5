"""Lease on a sweep: one process drives it at a time, wherever that runs.

Two files in the sweep's folder. `lock` is locked by the driver, and the kernel frees it when the
driver dies; that decides among processes of one machine. Some shared file systems keep such locks
to each machine, so `lease` holds the owner's name and a beat that a thread renews: a driver on
another machine is refused while the beat is fresh, and takes over once it is silent.

Taking over puts a new file in the place of `lease`. A driver that wakes from a long suspension
still renews the old one, which nobody reads; `Lease.is_lost` tells it so before it writes.
"""

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from dpsweep.core.errors import StateError

_NO_LOCKS_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_TAKEN = (errno.EAGAIN, errno.EACCES)
_LOOK_SECONDS = 1.0
_LEASE_BYTES = 512
"""A lease has one length, so that renewing it in place never leaves a mixture of two."""

log = logging.getLogger(__name__)


class SweepInUse(StateError):
    """Another process drives the sweep, or did until a moment ago."""


@dataclass(frozen=True)
class LeaseTiming:
    """Interval at which a lease is renewed, and time after which it counts as abandoned."""

    beat_seconds: float = 4.0  # time between two beats
    silent_seconds: float = 30.0  # a lease that was silent for so long may be taken over
    settle_seconds: float = 1.0  # time after which two who took over at once have seen each other


LEASE_TIMING = LeaseTiming()


@dataclass(frozen=True)
class LeaseHolder:
    """Process that drives a sweep."""

    host: str  # its machine's name
    pid: int  # its process id there
    since: float  # when it began, in seconds since 1970
    machine: str = ""  # tells machines of one name apart, and a machine before and after a restart
    token: str = ""  # tells two leases apart
    beat: int = 0  # when it last renewed the lease, by its own clock, in whole seconds

    def __str__(self) -> str:
        minutes = (time.time() - self.since) / 60
        return f"process {self.pid} on {self.host}, for {minutes:.0f} min"


@dataclass
class Lease:
    """A sweep held by this process; made by `held`."""

    place: Path  # the lease's file
    owner: LeaseHolder  # this process
    pace: LeaseTiming  # how it is renewed
    taken_over: str | None  # from whom, in words for people; None if nobody held it
    _file: int = -1
    _confirmed: float = field(default_factory=lambda: _read_clock())
    _lost: bool = False
    _ended: threading.Event = field(default_factory=threading.Event)

    def is_lost(self) -> bool:
        """True if another driver has taken the lease; once true, it stays so.

        Cheap: the file is looked at only if the thread has not just done so, as after a
        suspension. Where it cannot be looked at for as long as it takes to be taken over,
        it counts as lost.
        """
        age = _read_clock() - self._confirmed
        if not self._lost and age > 2 * self.pace.beat_seconds:
            self._confirm()
        return self._lost

    def check(self) -> None:
        """Raise StateError if the lease is lost: this process must write nothing more."""
        if self.is_lost():
            raise StateError(
                f"{self.place.parent.name}: another process drives the sweep now: "
                f"{_read_lease(self.place) or 'unknown'}. This one was silent for longer than "
                f"{self.pace.silent_seconds:g} s (suspended?), and writes nothing more. Watch the "
                f"sweep with: dpsweep status {self.place.parent.name}"
            )

    def _confirm(self) -> None:
        """Look whether the lease is still this process's, and note when."""
        now = _read_clock()
        try:
            found = _read_lease(self.place)
        except OSError:
            self._lost = now - self._confirmed > self.pace.silent_seconds
            return
        if found is None or found.token != self.owner.token:
            self._lost = True
        else:
            self._confirmed = now

    def _renew(self) -> None:
        with contextlib.suppress(OSError):  # the file system is away: `_confirm` judges that
            os.pwrite(self._file, _encode_lease(self.owner, time.time()), 0)
        self._confirm()

    def _beat(self) -> None:
        while not self._lost and not self._ended.wait(self.pace.beat_seconds):
            self._renew()


@contextlib.contextmanager
def hold_lease(
    folder: Path, pace: LeaseTiming = LEASE_TIMING, wait_seconds: float = 0.0
) -> Iterator[Lease]:
    """Hold the sweep in `folder` for this process.

    Args:
        wait_seconds: How long to wait for another driver to end, or to be silent for long enough.

    Raises:
        SweepInUse: If another driver holds it.
    """
    end = time.monotonic() + wait_seconds
    with contextlib.ExitStack() as stack:
        lease = None
        while lease is None:
            try:
                lease = stack.enter_context(_acquire_lease(folder, pace))
            except SweepInUse as e:
                if time.monotonic() >= end:
                    raise
                if wait_seconds:
                    log.warning("%s. Waiting for it, up to %g s", e, wait_seconds)
                    wait_seconds = 0.0
                time.sleep(_LOOK_SECONDS)
        yield lease


@contextlib.contextmanager
def _acquire_lease(folder: Path, pace: LeaseTiming) -> Iterator[Lease]:
    with (folder / "lock").open("a+") as lock:
        locked = _try_lock(lock)
        previous = _read_lease(folder / "lease")
        if locked is False:
            raise _make_in_use_error(folder, previous)
        os.utime(lock.fileno())
        said = _describe_takeover(folder, previous, locked=bool(locked), pace=pace)
        me = LeaseHolder(
            host=socket.gethostname(),
            pid=os.getpid(),
            since=time.time(),
            machine=get_machine_id(),
            token=secrets.token_hex(8),
        )
        lease = Lease(folder / "lease", me, pace, said)
        _write_lease(lease, previous)
        thread = threading.Thread(target=lease._beat, name="dpsweep-lease", daemon=True)
        thread.start()
        try:
            yield lease
        finally:
            lease._ended.set()
            thread.join()
            _release(lease)


def find_lease_holder(folder: Path, pace: LeaseTiming = LEASE_TIMING) -> LeaseHolder | None:
    """Find the process that drives the sweep in `folder` now; None if none does."""
    if not (folder / "lock").exists():
        return None
    with (folder / "lock").open("r") as lock:
        locked = _try_lock(lock, fcntl.LOCK_SH)
        known = _read_lease(folder / "lease")
        if known is None or locked is False:
            return known
        with contextlib.suppress(OSError):
            os.utime(folder / "lock")
        fresh = get_silence_seconds(folder) < pace.silent_seconds
        return known if fresh and not _is_dead(known, locked=bool(locked)) else None


def read_last_holder(folder: Path) -> LeaseHolder | None:
    """Read who wrote the lease in `folder`, alive or not."""
    return _read_lease(folder / "lease")


def may_be_suspended(folder: Path, pace: LeaseTiming = LEASE_TIMING) -> bool:
    """True if whoever holds the lease has not renewed it for longer than it may be silent."""
    with contextlib.suppress(OSError):
        os.utime(folder / "lock")
    return get_silence_seconds(folder) > pace.silent_seconds


def get_silence_seconds(folder: Path) -> float:
    """Seconds from the lease's last renewal to the last touch of `lock`.

    Both times are the file system's own, so that the clocks of two machines need not agree.
    """
    try:
        return (folder / "lock").stat().st_mtime - (folder / "lease").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def get_machine_id() -> str:
    """Get an id of this machine since its boot; its name where the system gives none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # containers count their own processes
    except OSError:
        return socket.gethostname()


def _try_lock(lock: IO[str], kind: int = fcntl.LOCK_EX) -> bool | None:
    """True if it was locked, False if another holds it, None where there are no locks."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in _TAKEN:
            return False
        if e.errno in _NO_LOCKS_HERE:
            return None
        raise
    return True


def _describe_takeover(
    folder: Path, previous: LeaseHolder | None, *, locked: bool, pace: LeaseTiming
) -> str | None:
    """From whom the sweep is taken over, in words; None if nobody left it behind.

    Raises:
        SweepInUse: If that driver may be alive.
    """
    if previous is None:
        return None
    silent = max(0.0, get_silence_seconds(folder))
    if not _is_dead(previous, locked=locked) and silent < pace.silent_seconds:
        left = math.ceil(pace.silent_seconds - silent)
        raise SweepInUse(
            f"sweep {folder.name!r} is being driven by {previous}, as of {silent:.0f} s ago. If "
            f"that driver is gone, try again in {left} s; otherwise "
            f"watch it with: dpsweep status {folder.name}; end it with: dpsweep stop {folder.name}"
        )
    return f"taken over from process {previous.pid} on {previous.host}, silent for {silent:.0f} s"


def _is_dead(owner: LeaseHolder, *, locked: bool) -> bool:
    """True if the owner is known to be dead: of this machine, and its lock or its id is free."""
    if owner.machine != get_machine_id():
        return False
    if locked or owner.pid == os.getpid():
        return True
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _write_lease(lease: Lease, previous: LeaseHolder | None) -> None:
    """Write the lease, open it for renewal, and make sure that nobody else did the same.

    Raises:
        SweepInUse: If another process was faster.
    """
    folder = lease.place.parent
    handle, name = tempfile.mkstemp(dir=folder, prefix=".lease.")  # 0600
    lease._file = handle
    try:
        os.pwrite(handle, _encode_lease(lease.owner, time.time()), 0)
        os.fsync(handle)
        if previous is None:
            with contextlib.suppress(FileExistsError):  # another was faster, as is seen below
                os.link(name, lease.place)
        else:
            os.replace(name, lease.place)
            if previous.machine != lease.owner.machine:
                time.sleep(lease.pace.settle_seconds)
        lease._confirm()
        if lease.is_lost():
            raise _make_in_use_error(folder, _read_lease(lease.place))
    except BaseException:
        os.close(handle)
        raise
    finally:
        Path(name).unlink(missing_ok=True)


def _release(lease: Lease) -> None:
    """Remove the lease, unless another has taken it over."""
    with contextlib.suppress(OSError):
        found = _read_lease(lease.place)
        if found and found.token == lease.owner.token:
            lease.place.unlink(missing_ok=True)
    os.close(lease._file)


def _make_in_use_error(folder: Path, owner: LeaseHolder | None) -> SweepInUse:
    hint = (
        f"It has been silent for {get_silence_seconds(folder):.0f} s and may be suspended: wake it "
        f"with kill -CONT {owner.pid}, or end it with kill -KILL {owner.pid}, on {owner.host}"
        if owner and may_be_suspended(folder, LEASE_TIMING)
        else f"Watch it with: dpsweep status {folder.name}; end it with: dpsweep stop {folder.name}"
    )
    return SweepInUse(
        f"sweep {folder.name!r} is being driven by {owner or 'another process'}. {hint}"
    )


def _read_lease(place: Path) -> LeaseHolder | None:
    """The owner a lease names; of unknown name if a crash of the machine left it torn."""
    try:
        return LeaseHolder(**json.loads(place.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return LeaseHolder("an unknown host", 0, time.time())


def _encode_lease(owner: LeaseHolder, beat: float) -> bytes:
    return json.dumps({**asdict(owner), "beat": int(beat)}).ljust(_LEASE_BYTES).encode()


def _read_clock() -> float:
    """Seconds that also pass while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)
