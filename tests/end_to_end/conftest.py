"""Servers that whole sweeps talk to, started and ended for real."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest


@pytest.fixture
def start_mlflow(tmp_path):
    """Starts an MLflow server on a port, over the same files each time; all end with the test."""
    running = []

    def start(port):
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--port", str(port)),
                *("--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/server.db"),
                *("--artifacts-destination", str(tmp_path / "server-artifacts")),
            ],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        running.append(server)
        wait_for(lambda: answers(port), "MLflow's answer")
        return lambda: end(server)

    yield start
    for server in running:
        end(server)


@pytest.fixture
def free_port():
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def end(server):
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def answers(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition, what, seconds=90):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)
