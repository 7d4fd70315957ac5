"""A cluster that does not let us in says why: another version, another token."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._private.utils import check_version_info
from waiting import wait_for

from dpsweep.cluster.connect import explain_refusal


def test_versions_of_both_sides_are_named():
    theirs = {"ray_version": "2.50.0", "python_version": "3.10.1"}
    with pytest.raises(RuntimeError) as refused:
        check_version_info(theirs, "here")
    assert explain_refusal(refused.value) == (
        f"it runs Ray 2.50.0, Python 3.10.1, and here is Ray {ray.__version__}, Python "
        f"{sys.version.split()[0]}. Install the same versions on both sides"
    )


@pytest.mark.slow
@pytest.mark.ray
def test_a_wrong_token_is_named_as_one(tmp_path, dpsweep, sweep_file):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"ray-{port}"  # short: it holds sockets
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block"]
    options = [f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
    head = subprocess.Popen(
        [*command, *options, f"--temp-dir={folder}"],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for(lambda: _listens(port), "the head's port")
        where = ("--address", f"127.0.0.1:{port}")
        wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64}
        said = dpsweep("launch", sweep_file, *where, code=2, **wrong)
        assert "the token here is missing or not the cluster's" in said
        assert "Traceback" not in said
    finally:
        head.terminate()
        head.wait()


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
