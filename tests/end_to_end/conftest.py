"""Servers that whole sweeps talk to, started and ended for real."""

import pytest
import servers


@pytest.fixture
def start_mlflow(tmp_path):
    """Starts an MLflow server on a port, over the same files each time; all end with the test."""
    running = []

    def start(port):
        running.append(server := servers.start_mlflow(tmp_path, port))
        return lambda: servers.end_group(server)

    yield start
    for server in running:
        servers.end_group(server)
