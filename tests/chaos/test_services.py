"""Servers that go away and come back while a sweep runs: MLflow, PostgreSQL, the S3 store."""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from ordeals import tell
from waiting import wait_for

from dpsweep.cluster.local import Local
from dpsweep.cluster.processes import listens, sweep_up
from dpsweep.cluster.services import check_installed, mlflow, postgres, s3, start_services
from dpsweep.core.errors import DpSweepError
from dpsweep.tracking.spool import read_backlog

pytestmark = [pytest.mark.ray, pytest.mark.slow]

AWAY_SECONDS = float(os.environ.get("DPSWEEP_CHAOS_AWAY", "15"))


@pytest.fixture(scope="module")
def service():
    """Two nodes, with MLflow on PostgreSQL and S3."""
    try:
        check_installed()
    except DpSweepError as e:
        pytest.skip(str(e))
    with tempfile.TemporaryDirectory(prefix="dpsweep-chaos-") as folder:
        os.chmod(folder, 0o711)
        local = Local(Path(folder) / "local")
        try:
            local.prepare(1)
            start_services(local)
            local.start_nodes(2)
            yield local
        finally:
            Local.at(local.folder).remove()


@pytest.fixture
def running(service, sweep, monkeypatch):
    """A sweep with its study and runs on the servers, in the middle of a trial."""
    environment = service.node_environment()
    for name, value in environment.items():
        if name.startswith(("PG", "MLFLOW_")):
            monkeypatch.setenv(name, value)

    def start(**how):
        it = sweep(environment={**environment, "DPSWEEP_PICTURES": "0"}, trials=6, **how)
        it.launch("--address", service.address, "--tracking-uri", tracking(service))
        return it, it.wait_for_trial()

    return start


def test_a_sweep_outlives_mlflows_server(service, running):
    it, number = running(name="mlflow-away")
    end(service, "MLflow")
    assert not listens(service.ports["mlflow"])
    rows = it.num_rows(number)
    time.sleep(AWAY_SECONDS)
    assert it.num_rows(number) > rows, "a trial waited for the tracking server"
    mlflow(service, words(service))
    seconds = it.wait_for_delivery(time.monotonic())
    it.finish()
    it.check(tracking(service))
    tell("MLflow away", seconds, f"after {AWAY_SECONDS} s, until it had everything")


def test_artifacts_wait_for_their_store(service, running):
    it, _ = running(name="s3-away")
    end(service, "the S3 store")
    wait_for(it.best.exists, "the sweep's end without its store")
    time.sleep(5)
    assert read_backlog(it.state.sweep(it.name).path).waiting, "nothing waits for the store"
    s3(service)
    seconds = it.wait_for_delivery(time.monotonic())
    it.finish()
    it.check(tracking(service))
    tell("S3 away", seconds, "from its return until MLflow had everything")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["in order", "crash"])
def test_a_sweep_outlives_its_postgresql(service, running, how):
    it, number = running(name=f"postgres-{how.name.lower()}")
    end(service, "PostgreSQL", how)
    time.sleep(AWAY_SECONDS)
    postgres(service, words(service)["postgres"])
    began = time.monotonic()
    seconds = it.wait_for_more(number, began)
    it.finish()
    it.check(tracking(service))
    tell(f"PostgreSQL restarted ({how.name})", seconds)


def end(service, name, how=signal.SIGKILL):
    (process,) = [p for p in service.services if p.name == name]
    os.kill(process.pid, how)
    if how == signal.SIGKILL:
        sweep_up([process], mark=None)
    wait_for(lambda: not process.members(), f"the end of {name}")
    service.services.remove(process)
    service.store()


def tracking(service):
    return service.client_extra["MLFLOW_TRACKING_URI"]


def words(service):
    return json.loads((service.folder / "secrets.json").read_text())
