"""Runs dpsweep's own verbs as jobs of a cluster that is elsewhere.

A sweep is driven by a job, so it goes on when this machine is gone. Its working folder is
temporary; what must last is in the state folder, which is absolute and the same on every node.
Other verbs are short jobs, whose output is shown here.
"""

import json
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath, PurePosixPath

from dpsweep.cluster.jobs import Job, Jobs, follow
from dpsweep.cluster.submitted import Submitted
from dpsweep.core.errors import ConfigError, ConnectionRefused, StateError
from dpsweep.tracking.server import redact_password

BEGIN, FILES = "--- dpsweep speaks ---", "--- dpsweep's files: "
"""Marks that PROGRAM prints before a verb's output, and before its files as JSON."""

PROGRAM = "dpsweep.cli.verbs.remote_job"
"""Runs a verb on the cluster's side."""

Show = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """Result of a verb that ran on the cluster."""

    code: int  # its exit code
    said: str  # its output
    files: dict[str, str]  # what it wrote, by name


def drive(
    jobs: Jobs, sweep: Submitted, words: Sequence[str], files: dict[str, bytes] | None = None
) -> str:
    """Start the job that drives a sweep; return its id.

    Raises:
        StateError: If a job drives it already.
    """
    before = jobs.find(sweep.job_prefix)
    if alive := [job for job in before if not job.has_ended]:
        raise _already_driven_error(sweep, alive[-1].id)
    numbers = [int(n) for job in before if (n := job.id.removeprefix(sweep.job_prefix)).isdigit()]
    job_id = f"{sweep.job_prefix}{max(numbers, default=0) + 1}"
    try:
        jobs.submit(job_id, _entrypoint(sweep, words), files or {})
    except StateError as e:  # another submit was faster
        raise _already_driven_error(sweep, job_id) from e
    return job_id


def last_job(jobs: Jobs, sweep: Submitted) -> str:
    """The id of the job that drives a sweep, or was the last one that did.

    Raises:
        StateError: If the cluster knows of none, as after it was started anew.
    """
    found = jobs.find(sweep.job_prefix)
    if not found:
        raise StateError(
            f"{sweep.address}: no job there has driven {sweep.name!r} since the cluster was "
            f"started. Go on with it with: dpsweep resume {sweep.name}"
        )
    return max(found, key=lambda job: int(job.id.removeprefix(sweep.job_prefix))).id


def watch(jobs: Jobs, job_id: str, show: Show) -> Ended:
    """Follow a job to its end, and show what its verb says.

    Raises:
        ConnectionRefused: If the job never came so far, with Ray's reason.
    """
    job, said = follow(jobs, job_id, _behind_mark(show))
    return _describe_end(job, said)


def run(jobs: Jobs, sweep: Submitted, words: Sequence[str], show: Show) -> Ended:
    """Run a short verb on the cluster and wait for it.

    Raises:
        ConnectionRefused: If its job cannot be started.
    """
    job_id = f"dpsweep-{words[0]}-{secrets.token_hex(6)}"
    jobs.submit(job_id, _entrypoint(sweep, words), {})
    return watch(jobs, job_id, show)


def split_output(job: Job, said: str) -> tuple[str, str]:
    """Split a job's output into what its verb printed and its files as JSON; empty if none.

    Raises:
        ConnectionRefused: If the job ended before its verb began, with Ray's reason.
    """
    _, mark, behind = said.partition(f"{BEGIN}\n")
    if not mark and job.has_ended:
        raise ConnectionRefused(_never_began(job, said))
    words, found, listing = f"\n{behind}".rpartition(f"\n{FILES}")  # ours is the last line of all
    return (f"{words}\n"[1:], listing) if found else (behind, "")


def check_state(folder: str | None) -> None:
    """Raise ConfigError for a state folder that would end with its job."""
    if folder is not None and not PurePosixPath(folder).is_absolute():
        raise ConfigError(
            f"--state {folder}: is relative, and a job's folder on the cluster is deleted with the "
            f"job. Name an absolute folder that every node sees, such as --state /shared/dpsweep"
        )


def check_not_secret(option: str, uri: str | None) -> None:
    """Raise ConfigError for a password in what the cluster's dashboard would show."""
    if uri and redact_password(uri) != uri:
        raise ConfigError(
            f"{option} {redact_password(uri)}: holds a password, and a job's command line is "
            f"shown on the cluster's dashboard. Leave the password out, and give it to the "
            f"cluster's own environment: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            f"~/.pgpass (PGPASSFILE) on its nodes"
        )


def _entrypoint(sweep: Submitted, words: Sequence[str]) -> str:
    where = ["--state", sweep.state] if sweep.state else []
    for before, word in pairwise(["", *where, *words]):
        check_not_secret(before, word)
        option, _, value = word.partition("=")
        check_not_secret(option, value)
    return shlex.join(["python", "-m", PROGRAM, "--owner", sweep.owner, *where, "--", *words])


def _already_driven_error(sweep: Submitted, job_id: str) -> StateError:
    return StateError(
        f"sweep {sweep.name!r} is being run at {sweep.address}, by job {job_id}. Follow it with: "
        f"dpsweep logs {sweep.name} --follow; end it with: dpsweep stop {sweep.name}; or launch "
        f"under another name with --name {sweep.name}-2"
    )


def _behind_mark(show: Show) -> Show:
    """Show what comes behind the mark: what stands before it is Ray's own."""
    pending, begun = "", False

    def shown(text: str) -> None:
        nonlocal pending, begun
        if not begun:
            pending += text
            _, mark, text = pending.partition(f"{BEGIN}\n")
            begun = bool(mark)
        if begun and text:
            show(text.partition(FILES)[0])

    return shown


def _describe_end(job: Job, said: str) -> Ended:
    words, listing = split_output(job, said)
    files = _files(job, listing.partition("\n")[0]) if listing else {}
    code = job.exit_code if job.exit_code is not None else int(job.status != "SUCCEEDED")
    if job.status != "SUCCEEDED" and job.exit_code is None:
        words += f"The job ended without an exit code: {job.message}\n"
    return Ended(code, words, files)


def _files(job: Job, listing: str) -> dict[str, str]:
    """Files that a job says it wrote; not trusted, since anybody's code may have printed that.

    Raises:
        ConnectionRefused: For a name that leads out of the folder where it is to be written.
    """
    try:
        found = {str(name): str(text) for name, text in json.loads(listing).items()}
    except (ValueError, AttributeError) as e:
        raise ConnectionRefused(
            f"job {job.id}: its list of files cannot be read ({e}). Something else may have "
            f"printed it; look at all that it said on the cluster's dashboard"
        ) from e
    for name in found:
        if name in ("", "..") or name != PurePath(name).name or "\0" in name:
            raise ConnectionRefused(
                f"job {job.id}: names a file {name!r}, which is no plain name, so nothing is "
                f"written. Do you trust the cluster, and the code of your model?"
            )
    return found


def _never_began(job: Job, said: str) -> str:
    if "No module named" in said:
        missing = said.rpartition("No module named")[2].strip().splitlines()[0]
        return (
            f"job {job.id}: the cluster has no Python module {missing}. Install the same version "
            f"of dpsweep on every node, where `python` finds it"
        )
    last = [line for line in f"{said}\n{job.message}".splitlines() if line.strip()]
    return f"job {job.id} did not start ({job.status}): {' / '.join(last[-3:]) or 'no reason told'}"
