"""What comes before a sweep's first trial, or the next of an old one, for shell and Python alike.

Every mistake is found before Ray is started or a file written, but this node's copy of the data.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpsweep.config.sweep import Sweep
from dpsweep.core.errors import ConfigError
from dpsweep.execution.launch import Session, old_session
from dpsweep.execution.preflight import check_files, check_services
from dpsweep.results.export import check_target
from dpsweep.search.warm_start import experience
from dpsweep.store.state_dir import State
from dpsweep.store.study import open_study
from dpsweep.training.check import check_sweep


@dataclass(frozen=True)
class Place:
    """Where a sweep is to run, and where it is to be kept.

    Attributes:
        state: Its state folder.
        address: Of a Ray cluster; None for an embedded one.
        tracking_uri: Of an MLflow server; None for a file in the state folder.
        storage: Of the study; None for a file in the state folder.
    """

    state: State
    address: str | None = None
    tracking_uri: str | None = None
    storage: str | None = None


def check(
    sweep: Sweep,
    place: Place,
    out: Path | None,
    warn: Callable[[list[str]], None],
    *,
    fetch: bool = False,
) -> None:
    """Checks a new sweep: its trials, its data, where it is to go, and who could watch it.

    Args:
        sweep: The sweep.
        place: Where it is to run.
        out: Where its best config goes; None for the state folder alone.
        warn: Called with what is allowed and worth knowing.
        fetch: Whether missing data are downloaded.

    Raises:
        DpSweepError: At the first mistake.
    """
    warn(check_sweep(sweep, fetch=fetch))
    if sweep.config.learn_from:
        earlier = open_study(sweep.config.learn_from, place.state)
        experience(sweep, earlier.sweep, earlier.records())
    check_services(sweep, place.state, place.tracking_uri, place.storage)
    if out is not None:
        check_target(out)
    check_secrecy(sweep, place.address)


@contextmanager
def reopened(
    name: str,
    place: Place,
    out: Path | None,
    warn: Callable[[list[str]], None],
    *,
    file: Sweep | None = None,
    accept: bool = False,
    force: bool = False,
    wait_seconds: float = 0.0,
) -> Iterator[Session]:
    """An old sweep to go on with, checked; Ray is needed only if it is not finished.

    Args:
        name: The sweep's, in its state folder.
        place: Where it is to go on; `storage` if its study has moved.
        out: Where its best config goes; None for the state folder alone.
        warn: Called with what is allowed and worth knowing.
        file: What its file says now, if it is to be compared.
        accept: True to take over what changed there, where that does no harm.
        force: True to drive somebody else's.
        wait_seconds: How long to wait for another driver.

    Raises:
        DpSweepError: At the first mistake; if there is none, or another process drives it.
    """
    if out is not None:
        check_target(out)
    folder = place.state.sweep(name)
    folder.check_mine(force=force)
    check_files(place.state, folder.tracking_uri, place.storage or folder.storage_uri)
    with old_session(
        name, place.state, place.storage, file, accept=accept, wait_seconds=wait_seconds
    ) as session:
        if session.lease.taken_over:
            warn([session.lease.taken_over])
        check_secrecy(session.sweep, place.address)
        yield session


def check_secrecy(sweep: Sweep, address: str | None, option: str = "--address") -> None:
    """Raises ConfigError where others could watch a private selection; `option` named the place."""
    if sweep.is_private_selection and address:
        raise ConfigError(
            f"{option} {address}: accounting: private_selection keeps the number of trials and "
            f"the losing ones secret, and a cluster's own logs on every node would tell them. "
            f"Launch it on one machine without {option}, or write accounting: composition"
        )
