"""The benchmark of correlated noise: both arms are searched alike, and the figure is drawn."""

import json
import sys
import xml.etree.ElementTree
from dataclasses import asdict
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bandmf(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), str(BENCHMARKS / "search"), *sys.path])
    import bandmf

    return bandmf


def test_arms_have_equal_searches_and_their_results_a_table(bandmf, tmp_path, capsys):
    setting = bandmf.Setting("digits", 1, 4.0, (64,), fresh=4, factors=(0.25, 0.5))
    data = bandmf.load_dataset(
        bandmf.make_config(setting, {"name": "dp_sgd"}, 64, 1.0, 0, "").data, 0
    )
    arms = {
        name: bandmf.search_arm(setting, {"name": name}, data, "", tmp_path / "runs")
        for name in ("dp_sgd", "bandmf")
    }
    kept = (tmp_path / "runs").read_text()
    assert (
        bandmf.search_arm(setting, {"name": "dp_sgd"}, data, "", tmp_path / "runs")
        == (arms["dp_sgd"])
    )
    assert (tmp_path / "runs").read_text() == kept, "what has ended is not run again"
    runs = {name: sum(map(len, arm["searched"].values())) for name, arm in arms.items()}
    assert runs == {"dp_sgd": 4, "bandmf": 4}
    assert arms["dp_sgd"]["bands"] == arms["dp_sgd"]["ratio"] == 1
    assert arms["bandmf"]["bands"] > 1 > arms["bandmf"]["ratio"]
    assert all(60 < accuracy < 100 for arm in arms.values() for accuracy in arm["fresh"])
    figure, results = tmp_path / "figure.svg", [{"setting": asdict(setting), "arms": arms}]
    bandmf.print_table(json.loads(json.dumps(results)), figure)
    assert "| digits | 1 | 4 | 64 |" in capsys.readouterr().out
    root = xml.etree.ElementTree.fromstring(figure.read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 3  # two of the legend
