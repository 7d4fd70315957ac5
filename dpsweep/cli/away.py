"""The verbs that reach clusters elsewhere: submit, logs, and others by a submitted sweep's name.

dpsweep/cli/route.py sends a verb here if its sweep was submitted from this machine.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpsweep.cli.say import console, warn
from dpsweep.cluster.jobs import Jobs, check_scheme, jobs_at
from dpsweep.cluster.package import packed
from dpsweep.cluster.submit import (
    Ended,
    check_not_secret,
    check_state,
    default_address,
    drive,
    last_job,
    run,
    watch,
)
from dpsweep.cluster.submitted import Submitted, all_remembered, check_free, remembered
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.report.export import check_target
from dpsweep.tune.owner import whoami
from dpsweep.tune.state import State

_STOPPED = 130


def submit(
    file: Path,
    settings: list[str],
    to: str | None,
    *,
    state: str | None = None,
    tracking_uri: str | None = None,
    storage: str | None = None,
    project: Path | None = None,
    detach: bool = False,
    out: Path | None = None,
    words: Sequence[str] = (),
) -> None:
    """Sends a sweep to a cluster, where a job launches it, and follows that.

    Args:
        file: The sweep file.
        settings: KEY=VALUE of the command line.
        to: The cluster; None for DPSWEEP_TO.
        state: State folder there; None for its DPSWEEP_STATE.
        tracking_uri: MLflow server; None for what the cluster's environment says.
        storage: Database of the study; the same.
        project: Folder of the user's code; None for the current one, if a model needs it.
        detach: Do not follow it.
        out: Where the best config goes here; None to leave it there.
        words: More options of `launch`.
    """
    address = _address(to)
    check_scheme(address)
    check_state(state)
    check_not_secret("--tracking-uri", tracking_uri)
    check_not_secret("--storage", storage)
    sweep, here = load_sweep(file, settings), State.at(None)
    if sweep.in_secret:
        raise ConfigError(
            f"--to {address}: accounting: private_selection keeps the number of trials and the "
            f"losing ones secret, and a cluster's own logs would tell them. Launch it on one "
            f"machine without --address, or write accounting: composition"
        )
    check_free(sweep.name, address, state, here)
    if out:
        check_target(out)
    name, files = packed(sweep, project)
    sent = Submitted(sweep.name, address, state, whoami())
    jobs = jobs_at(address)
    options = [
        *(("--tracking-uri", tracking_uri) if tracking_uri else ()),
        *(("--storage", storage) if storage else ()),
        *words,
    ]
    job_id = drive(jobs, sent, ["launch", name, "--name", sweep.name, *options], files)
    sent.remember(here)
    console().print(f"{sweep.name} runs at {address} as job {job_id}.", markup=False)
    if detach:
        console().print(_ways(sweep.name))
        return
    _follow(jobs, sent, job_id, out)


def resume(
    sweep: Submitted,
    address: str | None,
    words: Sequence[str],
    file: Path | None,
    state: str | None,
) -> None:
    """Goes on with a submitted sweep, by a new job; at another address if the cluster has moved."""
    moved = replace(sweep, address=address) if address else sweep
    files, named = dict[str, bytes](), sweep.name
    if file:
        named, files = packed(load_sweep(file), None)
    jobs = jobs_at(moved.address)
    job_id = drive(jobs, moved, ["resume", named, *words], files)
    moved.remember(State.at(state))
    console().print(f"{sweep.name} goes on at {moved.address} as job {job_id}.", markup=False)
    _follow(jobs, moved, job_id, None)


def logs(name: str, state: str | None, *, following: bool) -> None:
    """Prints what the job that drives a submitted sweep has said."""
    sweep = remembered(name, State.at(state))
    if sweep is None:
        known = ", ".join(one.name for one in all_remembered(State.at(state))) or "none"
        raise StateError(
            f"no sweep called {name!r} was submitted from here. Known: {known}. A sweep of this "
            f"machine is seen with: dpsweep status {name}"
        )
    jobs = jobs_at(sweep.address)
    job_id = last_job(jobs, sweep)
    if following:
        _follow(jobs, sweep, job_id, None)
        return
    print(jobs.output(job_id)[1], end="")


def answer(sweep: Submitted, words: Sequence[str]) -> None:
    """Runs a verb on the cluster, shows what it says, and ends as it ended."""
    ended = run(jobs_at(sweep.address), sweep, words, _say)
    if ended.code:
        sys.exit(ended.code)


def export(sweep: Submitted, words: Sequence[str], out: Path) -> None:
    """Writes the best configs of a submitted sweep to a folder here."""
    ended = run(jobs_at(sweep.address), sweep, ["export", sweep.name, *words], lambda text: None)
    if ended.code:
        _say(ended.said)
        sys.exit(ended.code)
    _write(ended, out)


def _address(to: str | None) -> str:
    address = to or default_address()
    if not address:
        raise ConfigError(
            "--to: no cluster is named, and DPSWEEP_TO is not set. Name one with --to "
            "http://HOST:8265, or start one on this machine with: dpsweep up --local"
        )
    return address.rstrip("/")


def _follow(jobs: Jobs, sweep: Submitted, job_id: str, out: Path | None) -> None:
    """Shows what the job says until it ends; Ctrl-C ends that, and not the sweep."""
    try:
        ended = watch(jobs, job_id, _say)
    except KeyboardInterrupt:
        warn([f"not followed any more; the sweep goes on. {_ways(sweep.name)}"])
        sys.exit(_STOPPED)
    if ended.code:
        console().print(f"The job ended with exit code {ended.code}.")
        sys.exit(ended.code)
    if out is None:
        console().print(f"Fetch its best config with: dpsweep export {sweep.name} -o best/")
        return
    found = run(jobs, sweep, ["export", sweep.name], lambda text: None)
    if found.code == 0 and found.files:
        out.write_text(next(iter(found.files.values())))
        console().print(f"best config: {out}", markup=False)


def _ways(name: str) -> str:
    return (
        f"Follow it with: dpsweep logs {name} --follow; see, end or resume it with: dpsweep status "
        f"| stop | resume {name}"
    )


def _write(ended: Ended, out: Path) -> None:
    for name in ended.files:
        check_target(out / name)
    for name, text in ended.files.items():
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
        console().print(f"{out / name}", markup=False)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
