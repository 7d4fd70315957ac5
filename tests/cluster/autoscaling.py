"""A Ray cluster of this machine that grows: Ray's own autoscaler, with nodes that are processes.

`ray.cluster_utils.AutoscalingCluster` would run `ray stop`, which ends other people's clusters too,
and reads a file that Ray's wheel lacks. The configuration is the same.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray
from waiting import CEILING_SECONDS, wait_for


@contextlib.contextmanager
def growing_cluster(**worker: float) -> Iterator[str]:
    """A head with one CPU, and up to two nodes of other resources; its address.

    Args:
        worker: Resources of a node that the autoscaler may add.
    """
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        config = Path(folder) / "autoscaler.json"
        address = f"{ray.util.get_node_ip_address()}:{port}"
        config.write_text(json.dumps(_config(worker, address)))
        log = (Path(folder) / "out").open("w")
        head = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}",
             "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={folder}",
             f"--autoscaling-config={config}"],
            env={**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                 "RAY_AUTH_MODE": "disabled", "RAY_CHDIR_TO_TRIAL_DIR": "0"},
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(lambda: _listens(port), "the head's port")
            yield address
        finally:
            ours = _processes(folder)
            head.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(30)
            for process in {*ours, *_processes(folder)} - {head.pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            head.wait(CEILING_SECONDS)
            log.close()


def _processes(folder: str) -> list[int]:
    """Processes whose command names a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if folder.encode() in place.read_bytes():
                found.append(int(place.parent.name))
    return found


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _config(worker: dict[str, float], address: str) -> dict[str, object]:
    kinds = {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": 2},
    }
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray")
    return {
        "cluster_name": "grows", "max_workers": 2,
        "provider": {
            "type": "fake_multinode", "gcs_address": address, "disable_node_updaters": True,
        },
        "available_node_types": kinds, "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0, "idle_timeout_minutes": 1, "auth": {}, "docker": {},
        "file_mounts": {}, "cluster_synced_files": [], "file_mounts_sync_continuously": False,
        "rsync_exclude": [], "rsync_filter": [], "worker_start_ray_commands": [],
        **{f"{name}_commands": [] for name in commands},
    }  # fmt: skip
