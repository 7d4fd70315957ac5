"""The verbs that reach clusters elsewhere: submit, logs, and others by a submitted sweep's name.

dpsweep/cli/verbs/route.py sends a verb here if its sweep was submitted from this machine.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpsweep.app.orchestrator import check_secrecy
from dpsweep.cli.options import format_options
from dpsweep.cli.say import STOPPED, console, say, warn
from dpsweep.cluster.jobs import ClusterLost, Jobs, check_scheme, jobs_at
from dpsweep.cluster.package import pack_sweep, summary
from dpsweep.cluster.submit import (
    check_not_secret,
    check_state,
    drive,
    last_job,
    run,
    split_output,
    watch,
)
from dpsweep.cluster.submitted import Submitted, all_remembered, check_free, read_submitted
from dpsweep.config.sweep import ResolvedSweep, load_sweep
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.results.export import check_target, default_target, write
from dpsweep.store.owner import whoami
from dpsweep.store.state_dir import StateFolder


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
    fetch_best: bool = False,
    quiet: bool = False,
    words: Sequence[str] = (),
) -> None:
    """Send a sweep to a cluster, where a job launches it, and follow that.

    Args:
        to: The cluster; None for DPSWEEP_TO.
        fetch_best: Whether it comes here in any case, to where `launch` would put it.
        words: More options of `launch`.
    """
    address = _address(to)
    check_scheme(address)
    check_state(state)
    check_not_secret("--tracking-uri", tracking_uri)
    check_not_secret("--storage", storage)
    sweep, here = load_sweep(file, settings), StateFolder.at(None)
    check_secrecy(sweep, address, "--to")
    check_free(sweep.name, address, state, here)
    if fetch_best:
        out = out or default_target(sweep.name)
    if out:
        check_target(out)
    name, files = pack_sweep(sweep, project, state)
    sent = Submitted(sweep.name, address, state, whoami())
    jobs = jobs_at(address)
    options = format_options({"tracking-uri": tracking_uri, "storage": storage, "quiet": quiet})
    say(summary(files), quiet=quiet)
    job_id = drive(jobs, sent, ["launch", name, "--name", sweep.name, *options, *words], files)
    sent.remember(here)
    say(f"{sweep.name} runs at {address} as job {job_id}.", quiet=quiet)
    if detach:
        console().print(_ways(sweep.name))
        return
    _follow(jobs, sent, job_id, out, quiet=quiet)


def resume(
    sweep: Submitted,
    address: str | None,
    *,
    file: ResolvedSweep | None,
    state: str | None,
    storage: str | None,
    out: Path | None,
    quiet: bool,
    words: Sequence[str],
) -> None:
    """Go on with a submitted sweep, by a new job.

    Args:
        address: Where the cluster is now, if it has moved.
        file: What its file says now, if what changed in it is to be taken over.
        state: State folder of this machine, which remembers the sweep.
    """
    check_not_secret("--storage", storage)
    if out:
        check_target(out)
    moved = replace(sweep, address=address) if address else sweep
    files, called = dict[str, bytes](), sweep.name
    if file:
        called, files = pack_sweep(file, None, state)
    jobs = jobs_at(moved.address)
    options = format_options({"storage": storage, "quiet": quiet})
    if files:
        say(summary(files), quiet=quiet)
    job_id = drive(jobs, moved, ["resume", called, *options, *words], files)
    moved.remember(StateFolder.at(state))
    say(f"{sweep.name} goes on at {moved.address} as job {job_id}.", quiet=quiet)
    _follow(jobs, moved, job_id, out, quiet=quiet)


def logs(name: str, state: str | None, *, following: bool) -> None:
    """Print what the job that drives a submitted sweep has said."""
    sweep = read_submitted(name, StateFolder.at(state))
    if sweep is None:
        known = ", ".join(one.name for one in all_remembered(StateFolder.at(state))) or "none"
        raise StateError(
            f"no sweep called {name!r} was submitted from here. Known: {known}. A sweep of this "
            f"machine is seen with: dpsweep status {name}"
        )
    jobs = jobs_at(sweep.address)
    job_id = last_job(jobs, sweep)
    if following:
        _follow(jobs, sweep, job_id, None)
        return
    job, said = jobs.output(job_id)
    words, _ = split_output(job, said)
    _say(words)
    if not words:
        say(f"Job {job_id} has said nothing yet ({job.status}).")


def answer(sweep: Submitted, words: Sequence[str]) -> None:
    """Run a verb on the cluster, show what it says, and end as it ended."""
    ended = run(jobs_at(sweep.address), sweep, words, _say)
    if ended.code:
        sys.exit(ended.code)


def export(sweep: Submitted, words: Sequence[str], out: Path) -> None:
    """Write the best configs of a submitted sweep to a folder here."""
    ended = run(jobs_at(sweep.address), sweep, ["export", sweep.name, *words], lambda text: None)
    if ended.code:
        _say(ended.said)
        sys.exit(ended.code)
    _write({out / name: text for name, text in ended.files.items()})


def _address(to: str | None) -> str:
    address = to or os.environ.get("DPSWEEP_TO")
    if not address:
        raise ConfigError(
            "--to: no cluster is named, and DPSWEEP_TO is not set. Name one with --to "
            "http://HOST:8265, or start one on this machine with: dpsweep up --local"
        )
    return address.rstrip("/")


def _follow(
    jobs: Jobs, sweep: Submitted, job_id: str, out: Path | None, *, quiet: bool = False
) -> None:
    """Show what the job says until it ends, and fetch the best config to `out`.

    Ctrl-C ends the following, and not the sweep; so does a cluster that does not answer any more.
    """
    try:
        ended = watch(jobs, job_id, _say)
    except KeyboardInterrupt:
        warn([f"not followed any more; the sweep goes on. {_ways(sweep.name)}"])
        sys.exit(STOPPED)
    except ClusterLost as e:
        raise ClusterLost(
            f"{e}. It has not answered for two minutes; if only the way there is cut, the sweep "
            f"goes on. When it answers again: {_ways(sweep.name)}"
        ) from e
    if ended.code:
        console(quiet=quiet).print(f"The job ended with exit code {ended.code}.")
        sys.exit(ended.code)
    if out:
        _fetch(jobs, sweep, out, quiet=quiet)
    else:
        words = f"Fetch its best config with: dpsweep export {sweep.name} -o best/"
        say(words, quiet=quiet)


def _fetch(jobs: Jobs, sweep: Submitted, out: Path, *, quiet: bool) -> None:
    """Write the best config to `out`, or that of each budget, named as `launch` names them."""
    found = run(jobs, sweep, ["export", sweep.name], lambda text: None)
    if found.code or not found.files:
        _say(found.said)
        sys.exit(found.code or 1)
    places = _beside(out, list(found.files))
    _write(dict(zip(places, found.files.values(), strict=True)), "best config: ", quiet=quiet)


def _beside(out: Path, exported: Sequence[str]) -> list[Path]:
    """`out` with the budget in its name, or with all of the exported name where that is not enough.

    >>> [str(p) for p in _beside(Path("b.yaml"), ["01-trial-0003.yaml"])]
    ['b.yaml']
    >>> [str(p) for p in _beside(Path("b.yaml"), ["01-trial-0003-epsilon-0.5.yaml"])]
    ['b-epsilon-0.5.yaml']
    >>> [str(p) for p in _beside(Path("b.yaml"), ["01-trial-0003.yaml", "02-trial-0001.yaml"])]
    ['b-01-trial-0003.yaml', 'b-02-trial-0001.yaml']
    """
    stems = [Path(name).stem for name in exported]
    ends = ["".join(stem.partition("-epsilon-")[1:]) for stem in stems]
    if len(set(ends)) < len(ends):
        ends = [f"-{stem}" for stem in stems]
    return [out.with_stem(f"{out.stem}{end}") for end in ends]


def _ways(name: str) -> str:
    return (
        f"Follow it with: dpsweep logs {name} --follow; see, end or resume it with: dpsweep status "
        f"| stop | resume {name}"
    )


def _write(files: dict[Path, str], what: str = "", *, quiet: bool = False) -> None:
    for place in files:
        check_target(place)
    for place, text in files.items():
        write(place, text)
        say(f"{what}{place}", quiet=quiet)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
