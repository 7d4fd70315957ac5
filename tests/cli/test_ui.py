"""`dpsweep ui` leads to the table of the newest sweep, not to MLflow's first page."""

import os
import re
import signal
import subprocess
import warnings

from servers import answers, free_port, python
from waiting import CEILING_SECONDS, wait_for

from dpsweep.store.state_dir import StateFolder


def test_ui_prints_the_address_of_the_newest_sweeps_table(tmp_path):
    state = StateFolder.at(str(tmp_path / "state"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        state.root.mkdir(mode=0o700)
        client = MlflowClient(state.tracking_uri)
        made = [client.create_experiment(name) for name in ("older", "newer")]
    port = free_port()
    ui = subprocess.Popen(
        python("dpsweep", "ui", "--state", state.root, "--port", port, "--no-browser"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        first, second = ui.stdout.readline(), ui.stdout.readline()
        wait_for(lambda: answers(port), "MLflow's answer", ui)
    finally:
        os.kill(ui.pid, signal.SIGTERM)
        ui.wait(CEILING_SECONDS)
        ui.stdout.close()
    address = rf"http://127\.0\.0\.1:{port}/#/experiments/{made[1]}/runs\?"
    view = rf"{address}viewStateShareKey=dpsweep&workflowType=machine_learning"
    assert re.search(rf"{view} ", first)
    assert re.fullmatch(rf"charts: {view}&compareRunsMode=CHART\n", second)
