"""Survey of a cluster's nodes: versions, clock, GPUs, and access to what trials need.

A node answers from a Ray task of its own, which takes no CPU, so that a busy node answers too. The
task looks for a token in the state folder, reads the data into the node's one copy of them, and
hashes it; what it hashes stays where it is. Where trials use GPUs, a task for each of a node's GPUs
computes on it; one that another job holds is not tried.
"""

import contextlib
import logging
import os
import platform
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import torch
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dpsweep.cluster.connect import cluster
from dpsweep.compat import has_autoscaler
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core import __version__
from dpsweep.core.disk import format_bytes, make_private_folder, translate_disk_full
from dpsweep.core.errors import ConfigError, DpSweepError, PrivateRowError, StateError
from dpsweep.data.read import fingerprint_images
from dpsweep.execution.resources import count_trials_per_node, make_bundle

_PATIENCE_SECONDS = 300.0
"""Until a node counts as silent; the first look at large data takes minutes."""

_GPU_SECONDS = 60.0
"""Seconds for a GPU to be assigned and to compute; one that is not is held by others."""

_NODE_SECONDS = 900.0
"""Seconds for an autoscaler to add a node: clouds take minutes for one with a GPU."""

CLOCKS_AGREE_SECONDS = 5.0
"""Clocks that differ by more make times in reports and leases hard to read."""


log = logging.getLogger(__name__)

Mark = tuple[bytes, str]
"""A key that is used once, and the fingerprint of data under it."""


@dataclass(frozen=True)
class NodeReport:
    """Answer of one node, or the fact that it gave none."""

    host: str
    node_id: str  # Ray's
    dpsweep: str = ""  # version there; empty if the node did not answer
    python: str = ""  # version of Python there
    torch: str = ""  # version of torch there
    ray: str = ""  # version of Ray there
    # its clock minus this machine's, in seconds; right to some milliseconds
    clock_offset_s: float = 0.0
    gpus: tuple[str, ...] = ()  # names of the GPUs that the driver there knows
    num_gpus: float = 0.0  # GPUs that Ray assigns there
    cuda: str | None = None  # CUDA version that torch was built for; None for a torch without
    # GPUs that torch has computed on: name, memory and compute capability of each
    cards: tuple[str, ...] = ()
    # True if a trial fits the node, so that data and state folder matter there
    runs_trials: bool = True
    # the data are there and are those of this machine; None if not asked
    data_ok: bool | None = None
    # the state folder is there, the same, and can be written; None if not asked
    state_ok: bool | None = None
    faults: tuple[str, ...] = ()  # what is wrong, in sentences without the host's name

    @property
    def answered(self) -> bool:
        """False for a node that could not run our task."""
        return bool(self.dpsweep)


@contextlib.contextmanager
def cluster_for(sweep: ResolvedSweep, state_root: Path, address: str | None) -> Iterator[None]:
    """Connect to Ray for the length of a sweep; on a cluster that was there, its nodes are asked.

    Raises:
        ConnectionRefused: If nothing answers at the address.
        StateError: If a node is not fit for the sweep's trials.
    """
    with cluster(address):
        if address is not None:
            wait_for_node(sweep)
            check_nodes(sweep, state_root)
        yield


def survey(
    sweep: ResolvedSweep | None,
    state_root: Path | None,
    patience_seconds: float = _PATIENCE_SECONDS,
    only: str | None = None,
) -> list[NodeReport]:
    """Ask every node of the connected cluster, all at once.

    Args:
        sweep: Whose data are looked for, where its trials fit; none if None.
        state_root: The state folder to look for; made for that if it is not there. None: not asked.
        patience_seconds: After so long a node counts as silent.
        only: The id of the one node to ask; None for all.

    Returns:
        One report a node, this machine's first, the others by host.
    """
    nodes = [n for n in ray.nodes() if n["Alive"] and only in (None, n["NodeID"])]
    needs = sweep.written if sweep else None
    key = os.urandom(32)  # for this survey alone
    mark = (key, fingerprint_images(needs.data, needs.seed, key)) if needs else None
    asked = needs.model_dump(mode="json") if needs else None
    with _show_token(state_root) as token:
        waiting = {}
        for node in nodes:
            has = node["Resources"]
            matters = sweep is None or count_trials_per_node(sweep.config.resources, has) > 0
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(facts)
            told = task.remote(asked if matters else None, mark, token if matters else None)
            waiting[told] = (node, matters)
        on_gpus = sweep is None or sweep.config.resources.gpu
        tried = _start_gpu_tasks(nodes) if on_gpus else {}
        found = list(_collect_reports(waiting, time.monotonic() + patience_seconds))
        found = _add_gpus(found, tried)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    found = [report for report in found if report.answered or report.node_id in alive]
    here = ray.get_runtime_context().get_node_id()
    return sorted(found, key=lambda r: (r.node_id != here, r.host, r.node_id))


def _start_gpu_tasks(nodes: Sequence[dict[str, Any]]) -> dict[Any, str]:
    """A task for each GPU that Ray assigns, and the id of its node."""
    return {
        ray.remote(
            num_gpus=1,
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )(compute_on_gpu).remote(): node["NodeID"]
        for node in nodes
        for _ in range(int(node["Resources"].get("GPU", 0.0)))
    }


def _add_gpus(found: list[NodeReport], tried: dict[Any, str]) -> list[NodeReport]:
    """Add to each report what its GPUs are, or why torch cannot use one."""
    done, late = (
        ray.wait(list(tried), num_returns=len(tried), timeout=_GPU_SECONDS) if tried else ([], [])
    )
    for held in late:
        ray.cancel(held, force=True)
    cards: dict[str, list[str]] = {}
    wrong: dict[str, str] = {}
    for told in done:
        try:
            cards.setdefault(tried[told], []).append(ray.get(told))
        except Exception as e:  # of torch, CUDA or Ray: whatever it is, trials would meet it
            wrong[tried[told]] = (
                f"torch cannot compute on a GPU that Ray assigns there ({_last_line(e)}). Look "
                f"at nvidia-smi there, and compare its driver with torch's CUDA; or start its Ray "
                f"with --num-gpus 0"
            )
    return [
        replace(
            report,
            cards=tuple(sorted(cards.get(report.node_id, []))),
            faults=report.faults
            + ((wrong[report.node_id],) if report.cuda and report.node_id in wrong else ()),
        )
        for report in found
    ]


def compute_on_gpu() -> str:
    """Compute on the GPU that this process was given, and describe it."""
    torch.zeros(1, device="cuda").sum().item()
    card = torch.cuda.get_device_properties(0)
    return f"{card.name}, {format_bytes(card.total_memory)}, capability {card.major}.{card.minor}"


def check_nodes(sweep: ResolvedSweep, state_root: Path) -> list[NodeReport]:
    """Ask every node, and refuse to begin if one is not fit for the sweep's trials.

    Raises:
        StateError: Naming every node at fault and what is missing there.
    """
    found = survey(sweep, state_root)
    if words := faults(found):
        raise StateError(
            f"{len(words)} of the cluster's {len(found)} nodes cannot run this sweep's trials. "
            f"{' '.join(words)}"
        )
    return found


def find_node_faults(sweep: ResolvedSweep, state_root: Path, node_id: str) -> list[str]:
    """Ask one node, and return what is wrong there; a node that is gone has no fault."""
    return faults(survey(sweep, state_root, only=node_id))


def wait_for_node(sweep: ResolvedSweep) -> None:
    """Ask the cluster's autoscaler for a node on which a trial fits, if no node is one, and wait.

    A cluster without an autoscaler is left as it is.

    Raises:
        ConfigError: If none came.
    """
    resources = sweep.config.resources
    wanted = make_bundle(resources)

    def is_there() -> bool:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return any(all(has.get(k, 0.0) >= v for k, v in wanted.items()) for has in nodes)

    if is_there() or not has_autoscaler():
        return
    size = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
    log.warning(
        "no node of the cluster has %s: waiting for its autoscaler to add one, %.0f min at most",
        size,
        _NODE_SECONDS / 60,
    )
    until = time.monotonic() + _NODE_SECONDS
    while not is_there():
        request_resources(bundles=[wanted])
        if time.monotonic() > until:
            request_resources(bundles=[])
            raise ConfigError(
                f"resources: a trial takes {size}, and the cluster's autoscaler has added no such "
                f"node within {_NODE_SECONDS / 60:.0f} min. Look at what it can add with: "
                f"ray status; or ask for less, such as --set resources.gpu=0 for CPUs"
            )
        time.sleep(1)


def faults(reports: Sequence[NodeReport]) -> list[str]:
    """One sentence or more for each node where trials would go wrong; empty if none would."""
    return [
        f"{report.host} (node {report.node_id[:8]}): {'; '.join(report.faults)}."
        for report in reports
        if report.runs_trials and report.faults
    ]


@contextlib.contextmanager
def _show_token(root: Path | None) -> Iterator[tuple[str, str, str] | None]:
    """Make a file in the state folder that nobody can have by chance; it is gone at the end.

    Gives (folder, file's name, content) for the nodes to look for; None without a folder.
    """
    if root is None:
        yield None
        return
    made = not root.exists()
    name, content = f".token-{secrets.token_hex(8)}", secrets.token_hex(16)
    with translate_disk_full(root):
        if made:
            make_private_folder(root)
        (root / name).write_text(content)
    try:
        yield str(root), name, content
    finally:
        for left in root.glob(f"{name}*"):
            left.unlink(missing_ok=True)
        if made and not any(root.iterdir()):
            root.rmdir()


def _collect_reports(
    waiting: dict[Any, tuple[dict[str, Any], bool]], until: float
) -> Iterator[NodeReport]:
    """The reports as they come; a clock is read when its node's report is in."""
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        now = time.time()
        for told in done or list(waiting):
            node, matters = waiting.pop(told)
            said: dict[str, Any]
            try:
                if not done:
                    ray.cancel(told, force=True)
                    raise TimeoutError("it did not answer in time")
                said = ray.get(told)
                report = _report(node, said, now)
            except Exception as e:  # a node that cannot import us, is gone, or does not answer
                report = _silent(node, e)
            yield replace(report, runs_trials=matters)


def _report(node: dict[str, Any], said: dict[str, Any], now: float) -> NodeReport:
    wrong = said.pop("faults") + [
        f"has {name} {said[name]}, and the driver {mine}. Install the same there: trials of one "
        f"sweep are compared"
        for name, mine in (("dpsweep", __version__), ("torch", torch.__version__))
        if said[name] != mine
    ]
    num_gpus = node["Resources"].get("GPU", 0.0)
    if num_gpus and said["cuda"] is None:
        wrong.append(
            f"Ray assigns {num_gpus:g} GPUs there, and its torch is built without CUDA. Install "
            f"a torch with CUDA"
        )
    return NodeReport(
        node_id=node["NodeID"],
        clock_offset_s=said.pop("clock") - now,
        num_gpus=num_gpus,
        faults=tuple(wrong),
        **said,
    )


def _silent(node: dict[str, Any], error: Exception) -> NodeReport:
    why = (
        f"does not run our tasks ({type(error).__name__}: {_last_line(error)}). Compare what is "
        f"installed there with this machine"
    )
    if "No module named 'dpsweep'" in str(error):
        why = "has no dpsweep. Install it in the Python that Ray runs with there"
    return NodeReport(node["NodeManagerHostname"], node["NodeID"], faults=(why,))


def _last_line(error: Exception) -> str:
    return next((x.strip() for x in reversed(str(error).splitlines()) if x.strip()), "")


def facts(
    needs: dict[str, Any] | None, mark: Mark | None, token: tuple[str, str, str] | None
) -> dict[str, Any]:
    """Describe this machine. The hash of the data is compared here, and does not leave it.

    Args:
        needs: A trial config whose data and files are to be here, as JSON.
        mark: A key, and what the data have to hash to under it.
        token: Folder, name and content of the file that is to be seen.
    """
    wrong: list[str] = []
    data_ok, state_ok = None, None
    if token:
        words = _state_fault(*token)
        state_ok, wrong = not words, [*wrong, *words]
    if needs:
        assert mark is not None, "there is one where there are needs"
        words = _data_fault(TrialConfig.model_validate(needs), mark)
        data_ok, wrong = not words, [*wrong, *words]
    return {
        "host": socket.gethostname(),
        "dpsweep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": version("ray"),
        "gpus": _gpus(),
        "cuda": torch.version.cuda,
        "data_ok": data_ok,
        "state_ok": state_ok,
        "faults": wrong,
        "clock": time.time(),
    }


def _state_fault(folder: str, name: str, content: str) -> list[str]:
    place = Path(folder) / name
    shared = "Put the state folder where every node sees it, with --state FOLDER"
    try:
        if place.read_text() != content:
            return [f"{place} is not the driver's file. {shared}"]
        mine = place.with_name(f"{name}-{secrets.token_hex(4)}")
        mine.write_text(content)
        mine.unlink()
    except FileNotFoundError:
        return [f"does not see the state folder {folder}. {shared}"]
    except OSError as e:
        return [
            f"cannot write to the state folder {folder}: {e.strerror}. Run Ray there as the user "
            f"who launches (here user {os.getuid()})"
        ]
    return []


def _data_fault(needs: TrialConfig, mark: Mark) -> list[str]:
    wrong = []
    try:
        if fingerprint_images(needs.data, needs.seed, mark[0]) != mark[1]:
            wrong.append(
                f"data.root: {needs.data.root!r} holds other data than the driver's. Copy them "
                f"afresh from there"
            )
    except PrivateRowError as e:  # its message quotes the row, and would leave the node
        wrong.append(e.public)
    except DpSweepError as e:
        wrong.append(str(e).removeprefix(f"{needs.data.name}: ").rstrip("."))
    for key in ("weights", "folder"):
        named = getattr(needs.model, key, None)
        if isinstance(named, str) and not Path(named).expanduser().exists():
            wrong.append(f"model.{key}: {named} is not there. Copy it there from the driver's node")
    return wrong


def _gpus() -> tuple[str, ...]:
    """Names as nvidia-smi has them, which sees those that Ray keeps from a task too."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in said.stdout.splitlines() if line.strip())
