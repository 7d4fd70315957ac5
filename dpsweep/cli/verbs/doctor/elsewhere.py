"""Doctor's checks of what is elsewhere: the tracking servers, and a Ray cluster with its nodes."""

import os
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from dpsweep.cli.verbs.doctor.context import DoctorContext, Finding, Level
from dpsweep.cluster.connect import check_answers, cluster
from dpsweep.cluster.nodes import CLOCKS_AGREE_SECONDS, NodeReport, survey
from dpsweep.compat import AWAY, REFUSED, TAKEN, answer_without_token, running_here
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.core.errors import DpSweepError
from dpsweep.store.study import read_stored_sweep
from dpsweep.tracking.access import allows_anonymous, get_artifact_root, request_proxied_artifacts
from dpsweep.tracking.mlflow import check_reachable
from dpsweep.tracking.server import is_server, redact_password

_PATIENCE_SECONDS = 60.0
_LOCAL = ("127.0.0.1", "::1", "localhost")


def tracking(context: DoctorContext) -> Iterator[Finding]:
    """Check that each tracking server answers, takes these credentials, and no anonymous ones."""
    for uri in context.tracking_uris:
        try:
            check_reachable(uri)
            yield Finding("tracking", "ok", f"{redact_password(uri)} answers")
            if is_server(uri):
                yield from _server(uri)
        except DpSweepError as e:
            yield Finding("tracking", "fail", str(e))


def _server(uri: str) -> Iterator[Finding]:
    shown, place = redact_password(uri), get_artifact_root(uri)
    if allows_anonymous(uri):
        yield Finding(
            "tracking",
            "warn",
            f"{shown} lets anybody in who reaches it, to read, change and delete results",
            "Start it with: mlflow server --app-name basic-auth (files: docs/guides/cluster.md)",
        )
    if urlsplit(uri).scheme == "http" and urlsplit(uri).hostname not in _LOCAL:
        yield Finding(
            "tracking",
            "warn",
            f"{shown} is not encrypted: whoever is on the way reads the password",
            "Put it behind https, or keep it in a network of its own",
        )
    kind = urlsplit(place or "").scheme
    if place is None:
        yield Finding("artifacts", "warn", f"{shown} does not tell where artifacts go")
    elif kind == "mlflow-artifacts":
        code = request_proxied_artifacts(uri)
        level: Level = "ok" if code < 400 else "fail"
        words = f"passed on by {shown}, which answers {code}"
        yield Finding("artifacts", level, words, "" if code < 400 else "Look at the server's log")
    elif kind in ("", "file"):
        yield Finding(
            "artifacts",
            "fail" if urlsplit(uri).hostname not in _LOCAL else "warn",
            f"{shown} tells its users to write artifacts to {place} themselves, a folder that only "
            f"the same machine has",
            "Start it with --serve-artifacts and --artifacts-destination",
        )
    else:
        words = f"written to {kind}: by the driver itself, which needs the store's credentials"
        yield Finding("artifacts", "ok", words)


def ray_access(context: DoctorContext) -> Iterator[Finding]:
    """Check that a Ray cluster refuses access without a token."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode == "disabled":
        words = "RAY_AUTH_MODE=disabled: clusters of one's own take anybody of this machine"
        yield Finding("ray", "warn", words, "Unset it")
    if context.address is None:
        yield Finding("ray", "ok", "no cluster named with --address: sweeps start one of their own")
        return
    try:
        check_answers(context.address)
    except DpSweepError as e:
        yield Finding("ray", "fail", str(e))
        return
    address = context.address if ":" in context.address else running_here()
    said = answer_without_token(address) if address else AWAY
    if said == TAKEN:
        yield Finding(
            "ray",
            "warn",
            f"the cluster at {address} takes anybody without a token: whoever reaches it runs "
            f"code there and reads the trials' secrets",
            "Start every node with RAY_AUTH_MODE=token and the same token (RAY_AUTH_TOKEN_PATH)",
        )
    elif said == REFUSED:
        yield Finding("ray", "ok", f"the cluster at {address} wants a token")
    elif address:
        yield Finding(
            "ray",
            "fail",
            f"{address} listens, and does not answer as a Ray cluster does",
            "Name the port of the cluster's head, as `ray start --head --port` had it (6379 if "
            "nothing was said)",
        )
    else:
        yield Finding("ray", "fail", "no cluster is found on this machine", "ray start --head")


def cluster_nodes(context: DoctorContext) -> Iterator[Finding]:
    """Versions, clock, GPUs, state folder and data on every node of a cluster."""
    if context.address is None:
        return
    try:
        with cluster(context.address):
            reports = survey(_newest(context), context.state.root, _PATIENCE_SECONDS)
    except DpSweepError as e:
        yield Finding("cluster", "fail", str(e))
        return
    for report in reports:
        yield from _node(report)


def _newest(context: DoctorContext) -> ResolvedSweep | None:
    """The sweep whose data are looked for."""
    for folder in reversed(context.sweeps):
        try:
            return read_stored_sweep(folder.name, context.state)
        except DpSweepError:
            continue
    return None


def _node(report: NodeReport) -> Iterator[Finding]:
    check = f"node {report.host}"
    level: Level = "fail" if report.runs_trials else "warn"
    for fault in report.faults:
        words, _, remedy = fault.partition(". ")
        yield Finding(check, level, words, remedy)
    if not report.answered:
        return
    offset = report.clock_offset_s
    if abs(offset) > CLOCKS_AGREE_SECONDS:
        words = f"its clock is {abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"
        yield Finding(check, "warn", words, "Keep clocks together with NTP (chrony)")
    if report.gpus and not report.num_gpus:
        words = f"has {len(report.gpus)} GPUs, and Ray assigns none"
        yield Finding(check, "warn", words, "Start its Ray with --num-gpus, CUDA_VISIBLE_DEVICES")
    if not report.faults:
        asked = {"data": report.data_ok, "state folder": report.state_ok}
        seen = [what for what, ok in asked.items() if ok]
        yield Finding(
            check,
            "ok",
            f"dpsweep {report.dpsweep}, python {report.python}, torch {report.torch}, ray "
            f"{report.ray}, clock {offset:+.2f} s, {report.num_gpus:g} GPUs, sees "
            f"{' and '.join(seen) or 'what was not asked for'}{_describe_cards(report)}",
        )


def _describe_cards(report: NodeReport) -> str:
    """Describe the GPUs that torch computed on, and those that others hold."""
    if not report.num_gpus:
        return ""
    cards = [f"{n} x {card}" for card, n in Counter(report.cards).items()]
    held = int(report.num_gpus) - len(report.cards)
    cards += [f"{held} not tried, as other jobs hold them"] if held > 0 else []
    return f"; torch computed on {'; '.join(cards)}" if report.cards else f"; {cards[0]}"
