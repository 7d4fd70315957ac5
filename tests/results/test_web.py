"""`watch --web` serves the report of a sweep that runs, to whoever has its address."""

import json
import os
import re
import signal
import subprocess
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from rich.console import Console
from servers import free_port, python
from waiting import CEILING_SECONDS

from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConnectionRefused, StateError
from dpsweep.results.live import LiveView
from dpsweep.results.web import LivePage, serve_page
from dpsweep.store.lease import LeaseHolder
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study

SECRET = ("accounting=private_selection", "sampler={name: random}", "pruner={name: none}")


@pytest.fixture
def live():
    """Given a study: its live page, while somebody drives the sweep."""

    def make(study):
        view = LiveView(study, Console(), lambda: LeaseHolder("host", 7, 0.0))
        return LivePage(study, view)

    return make


def fetch(address):
    with urlopen(address, timeout=CEILING_SECONDS) as answer:
        return answer.read().decode()


def written_in(folder):
    """When each file was written, but for the index by which SQLite's processes share its log."""
    files = (p for p in folder.rglob("*") if p.is_file() and not p.name.endswith("-shm"))
    return {p: p.stat().st_mtime_ns for p in files}


def test_the_report_follows_the_study_and_the_panel_says_what_runs(study_of, live):
    study = study_of([0.5], "budget.trials=3")
    running = study.ask()
    with serve_page(live(study), 0) as address:
        first = fetch(address)
        assert first.count("plotly.js v") == 1
        assert "connect-src 'self'" in first
        now = json.loads(fetch(f"{address}now"))
        assert "1/3 trials, 1 running, best 0.5000 (trial 0)" in now["panel"]
        assert "driven by process 7 on host" in now["panel"]
        report = fetch(f"{address}report")
        assert "not finished: 1 of 3 runs so far" in report
        assert "plotly.js v" not in report
        row = {"epoch": 2, "valid/accuracy": 0.7, "valid/loss": 1.0, "seconds": 1.0}
        study.report(running.number, row | {"privacy/epsilon_spent": 3.9, "noise_multiplier": 1.0})
        study.tell(running.number, "complete")
        panel = json.loads(fetch(f"{address}now"))["panel"]
        assert "2/3 trials, 0 running, best 0.7000 (trial 1)" in panel


def test_the_panel_links_to_mlflow_and_to_rays_dashboard(tmp_path, sweep_file, study_of):
    study, folder = study_of([]), StateFolder(tmp_path / "state").sweep("tiny")
    sweep = load_sweep(sweep_file)
    folder.create(sweep.file, sweep.base, 'http://anna:pw@mlflow:5000/?a="b"')
    folder.note_dashboard("http://head:8265")
    live = LivePage(study, LiveView(study, Console(), folder.owner), folder)

    def panel():
        return json.loads(live.answer("now")[1])["panel"]

    assert re.search(r'<a href="http://[^" ]*@mlflow:5000/\?a=&#34;b&#34;" [^>]*>MLflow<', panel())
    assert "pw" not in panel()
    assert "head:8265" not in panel(), "nobody drives it, and the dashboard may be gone"
    with folder.lease():
        assert '<a href="http://head:8265" target="_blank" rel="noreferrer">Ray</a>' in panel()


def test_a_new_report_has_a_new_version_and_is_not_made_all_the_time(study_of, live):
    study = study_of([0.5, 0.6], "budget.trials=4")
    page = live(study)

    def version():
        return json.loads(page.answer("now")[1])["version"]

    before = version()
    assert page.answer("report") == page.answer("report")
    asked = study.ask()
    study.tell(asked.number, "failed", reason="it broke")
    assert version() == before, "the last page took some time to make, and trials run"
    page._rests_until = 0.0
    assert version() != before
    assert "it broke" in page.answer("report")[1]


def test_who_does_not_know_the_address_sees_nothing(study_of, live):
    with serve_page(live(study_of([0.5])), 0) as address:
        root = "/".join(address.split("/")[:3])
        assert len(address) > len(root) + 20
        for path in ("", "/", "/now", "/report", f"/{'x' * 22}/now"):
            with pytest.raises(HTTPError, match="404"):
                fetch(root + path)
        with pytest.raises(HTTPError, match="404"):
            fetch(f"{address}../etc/passwd")


def test_before_the_first_result_it_says_what_runs(study_of, live):
    page = live(study_of([None]))
    assert json.loads(page.answer("now")[1])["version"] == ""
    assert "No trial is complete yet" in page.answer("")[1]


def test_of_a_private_selection_it_tells_that_it_runs(study_of, live):
    page = live(study_of([], *SECRET))
    now = json.loads(page.answer("now")[1])
    assert "a private selection tells nothing before its end" in now["panel"]
    assert now["version"] == ""
    with pytest.raises(StateError, match="nothing is told before its end"):
        page.answer("report")


def test_a_port_that_is_taken_is_refused_with_a_way_out(study_of, live):
    page = live(study_of([0.5]))
    with serve_page(page, 0) as address:
        port = int(address.split(":")[2].partition("/")[0])
        with (
            pytest.raises(ConnectionRefused, match=rf"--port {port}: .* Leave --port out"),
            serve_page(page, port),
        ):
            pass


def test_the_verb_serves_until_ctrl_c_and_writes_nothing(tmp_path, sweep_file, study_of):
    state = StateFolder(tmp_path / "state")
    sweep, folder = load_sweep(sweep_file), state.sweep("tiny")
    folder.create(sweep.file, sweep.base, None)
    study = Study.create(folder.storage_uri, sweep, folder.id)
    asked = study.ask()
    row = {"epoch": 2, "valid/accuracy": 0.5, "valid/loss": 1.0, "seconds": 1.0}
    study.report(asked.number, row | {"privacy/epsilon_spent": 3.9, "noise_multiplier": 1.0})
    study.tell(asked.number, "complete")
    before = written_in(state.root)
    port = free_port()
    watch = subprocess.Popen(
        python("dpsweep", "watch", "tiny", "--state", state.root, "--web", "--port", port),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = watch.stdout.readline().split()[2]
        assert address.startswith(f"http://127.0.0.1:{port}/")
        assert "0.5000" in json.loads(fetch(f"{address}now"))["panel"]
        assert "dpsweep report" in fetch(f"{address}report")
    finally:
        os.kill(watch.pid, signal.SIGINT)
        ended = watch.wait(CEILING_SECONDS)
        watch.stdout.close()
    assert ended == 0
    assert written_in(state.root) == before
