"""Gauges are what Ray's metrics port serves, and what the Grafana dashboard asks for."""

import json
import re
import tempfile
import urllib.request
from pathlib import Path

import pytest
import ray
from waiting import wait_for

from dpsweep.config.sweep import load_sweep
from dpsweep.execution.gauges import GAUGES, GaugeWatcher
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study

BOARD = Path(__file__).parents[2] / "docker/grafana/dpsweep.json"


def test_the_dashboard_asks_for_every_gauge_and_no_other():
    asked = set(re.findall(r"ray_(dpsweep_\w+)", BOARD.read_text()))
    assert asked == set(GAUGES)
    panels = json.loads(BOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len(GAUGES)


@pytest.mark.ray
def test_gauges_are_served_with_the_study_s_figures(sweep_file, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    state = StateFolder(tmp_path / "state")
    sweep, folder = load_sweep(sweep_file), state.sweep("tiny")
    folder.create(sweep.file, sweep.base, None)
    study = Study.create(state.storage_uri, sweep, folder.id)
    with tempfile.TemporaryDirectory(prefix="ray-") as place:
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=place)
        try:
            watcher = GaugeWatcher(study, folder.path)
            record = study.dispatch(study.ask(), void=False)
            watcher.on_trial_start(record)
            row = {"epoch": 1, "step": 11, "valid/accuracy": 0.25, "valid/loss": 1.0}
            row |= {"noise_multiplier": 1.2, "privacy/epsilon_spent": 1.5, "seconds": 0.5}
            study.report(0, row)
            watcher.on_trial_report(study.record(0), row)
            watcher.on_trial_end(study.tell(0, "complete"))
            wanted = {
                'dpsweep_trials{complete}': 1.0, 'dpsweep_trials{running}': 0.0,
                "dpsweep_best_value{}": 0.25, "dpsweep_trial_epsilon_max{}": 1.5,
                "dpsweep_spool_length{}": 0.0,
            }  # fmt: skip
            wait_for(lambda: wanted.items() <= read_gauges().items(), "the gauges")
        finally:
            ray.shutdown()


def read_gauges() -> dict[str, float]:
    """What Ray's agent serves: name{state} -> value."""
    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    found = {}
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:  # not yet
        return {}
    for line in lines:
        if named := re.match(r'ray_(dpsweep_\w+)\{.*sweep="tiny".*\} (\S+)', line):
            state = re.search(r'state="(\w+)"', line)
            found[f"{named[1]}{{{state[1] if state else ''}}}"] = float(named[2])
    return found
