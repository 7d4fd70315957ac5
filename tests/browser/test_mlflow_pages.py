"""MLflow's own UI shows what was told of a sweep: names, description, columns, the report."""

import subprocess
import warnings

import pytest
from servers import answers, free_port, python
from waiting import CEILING_SECONDS, wait_for

from dpsweep.compat import view_path

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

TEXT = "return document.body.innerText"


@pytest.fixture
def server(tmp_path, sweep_file, dpsweep):
    """The address of `dpsweep ui` over a real sweep of two trials, and its runs."""
    dpsweep("launch", sweep_file)
    port = free_port()
    ui = subprocess.Popen(
        python("dpsweep", "ui", "--port", port),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: answers(port), "MLflow's answer", ui)
    yield f"http://127.0.0.1:{port}"
    ui.terminate()
    ui.wait(CEILING_SECONDS)


def runs_of(address):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(address)
        experiment = client.get_experiment_by_name("tiny").experiment_id
        found = client.search_runs([experiment])
    parent = next(run for run in found if "dpsweep.sweep" in run.data.tags)
    children = sorted(
        (run for run in found if run is not parent), key=lambda run: run.data.tags["dpsweep.trial"]
    )
    return experiment, parent, children


def test_runs_read_and_the_report_is_shown(server, browser):
    experiment, parent, children = runs_of(server)
    place = f"{server}/#/experiments/{experiment}/runs"
    names = [child.info.run_name for child in children]
    lr = float(children[0].data.params["optimizer.lr"])
    assert names[0] == f"0000 fftkf lr {lr:.3g} B 128"

    browser.open(f"{server}/{view_path(experiment)}", width=1700)
    shown = browser.wait(
        f"const t = document.body.innerText; return t.includes({names[0]!r}) && t",
        "the table of runs",
    )
    for word in (*names, "valid/accuracy", "method.name", "method.kappa"):
        assert word in shown

    browser.open(f"{server}/{view_path(experiment, charts=True)}", width=1700)
    shown = browser.wait(
        "const t = document.body.innerText;"
        "return document.querySelector('.parcoords') &&"
        " document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length >= 2 && t",
        "parallel coordinates and a curve of each trial",
    )
    for word in ("Sweep", "Parallel Coordinates", "valid/accuracy"):
        assert word in shown

    for run, words in (
        (parent, ["Privacy and result.", "differentially private"]),
        (children[0], ["Privacy.", "This run by itself"]),
    ):
        browser.open(f"{place}/{run.info.run_id}", width=1700)
        shown = browser.wait(
            f"const t = document.body.innerText; return t.includes({words[0]!r}) && t", "the run"
        )
        assert run.info.run_name in shown
        assert all(word in shown for word in words)

    browser.open(f"{place}/{parent.info.run_id}/artifacts/report.html", width=1700)
    browser.wait("return document.querySelector('iframe')", "the report's frame")
    browser.driver.switch_to.frame(browser.driver.find_element("tag name", "iframe"))
    try:
        browser.wait(
            "return document.querySelectorAll('.plot svg.main-svg').length >= 6", "figures"
        )
        assert browser.run(TEXT).startswith("dpsweep report")
    finally:
        browser.driver.switch_to.default_content()
