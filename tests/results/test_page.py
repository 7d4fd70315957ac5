"""The page holds what a reader needs, escaped, and fetches nothing."""

import json
import re

import pytest

from dpsweep.cli.verbs.report import report
from dpsweep.config.source import read_yaml
from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import load_trial
from dpsweep.core.errors import StateError
from dpsweep.results.disclosure import TellsWinner
from dpsweep.results.figures import figures
from dpsweep.results.page import page
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study


def without_plotly(text):
    """The page without the library, which is long and not ours."""
    return re.sub(r"<script>(?!\s*\"use strict\").*?</script>", "", text, count=1, flags=re.DOTALL)


def data_of(text):
    found = re.findall(r'<script type="application/json" id="data-([\w-]+)">(.*?)</script>', text)
    return {name: json.loads(data) for name, data in found}


def test_result_and_both_epsilons_come_first_and_the_config_last(study_of, tmp_path):
    study = study_of([0.5, 0.9, 0.8], "confirm={top: 1, seeds: 2}", repeats=[0.7, 0.8])
    text = page(study)
    heads = re.findall(r'<h2 id="(\w+)">', text)
    assert heads == ["result", "privacy", "tables", "figures", "config", "again", "made"]
    facts = re.findall(r"<li><b>(.*?)</b><span>(.*?)</span>", text)
    named = [words.partition(",")[0] for _, words in facts[1:3]]
    assert named == ["trial 1 alone", "the whole search"]
    stated = re.search(r"any choice among them: \(([\d.]+),", text).group(1)
    assert [figure for figure, _ in facts[1:3]] == ["ε = 4", f"ε = {stated}"]
    assert "differentially private for adding or removing any one" in text
    assert "3 trials" in text or "3 adaptive trials" in text
    assert "0.7500 ± 0.0707" in text
    assert set(data_of(text)) == set(figures(study))
    config = re.search(r'<pre id="config-1"[^>]*>(.*?)</pre>', text, re.DOTALL).group(1)
    place = tmp_path / "copied.yaml"
    place.write_text(config.replace("&#39;", "'").replace("&gt;", ">").replace("&amp;", "&"))
    assert load_trial(read_yaml(place)) == study.record(1).config


def test_a_void_sweep_is_shown_with_no_epsilon(study_of):
    study = study_of([0.5, 0.9])
    assert "at ε 4 (" in page(study)
    study.note_test_secret()
    text = page(study)
    assert "at ε none (void) (" in text
    assert "ε = none (void)" in text
    assert "ε = 4" not in without_plotly(text).partition('id="tables"')[0]


def test_the_library_is_there_once_and_nothing_is_fetched(study_of):
    text = page(study_of([0.5, 0.9]))
    assert text.count("plotly.js v") == 1
    rest = without_plotly(text)
    assert len(rest) < 200_000
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)[^\s"'>)]+""", rest)
    assert "default-src 'none'" in rest


def test_what_a_user_wrote_is_escaped(study_of):
    study = study_of([0.5, None, 0.6], reason="</script><script>alert(1)</script><b>")
    rest = without_plotly(page(study))
    assert "<script>alert" not in rest
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in rest


def test_without_a_result_it_says_what_to_do(study_of):
    with pytest.raises(StateError, match=r"has no complete trial yet\. See: dpsweep status tiny"):
        page(study_of([None]))


def test_of_a_private_selection_it_tells_of_the_winner_alone(study_of):
    secret = ("accounting=private_selection", "sampler={name: random}", "pruner={name: none}")
    study = study_of([], *secret)
    with pytest.raises(StateError, match="nothing is told before its end"):
        page(study)
    earlier = study_of([0.5], name="other").record(0)
    lost = study_of([], *secret, name="lost")
    lost.add_failed()
    with pytest.raises(StateError, match="has no complete trial yet"):
        page(lost)
    study.add_winner(earlier, {"sampling_rate": 0.09, "noise_multiplier": 1.07, "steps": 22})
    text = page(study)
    assert TellsWinner.no_figures in text
    assert data_of(text) == {}
    assert "All runs" not in text
    assert "trials in the search" not in text


def test_a_search_that_goes_on_says_so(study_of):
    study = study_of([0.5, 0.6], "confirm={top: 1, seeds: 2}", repeats=[0.6])
    assert "not finished: 3 of 4 runs so far" in page(study)


def test_the_page_of_anothers_sweep_lies_beside_and_not_in_a_folder(
    study_of, tmp_path, sweep_file, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPSWEEP_STORAGE", raising=False)
    monkeypatch.setenv("DPSWEEP_OWNER", "alice")
    sweep = load_sweep(sweep_file)
    folder = StateFolder.at(None).sweep(sweep.name)
    folder.create(sweep.file, sweep.base, None)
    study = Study.create(folder.storage_uri, sweep, folder.id, owner="alice")
    charged = {"sampling_rate": 0.09, "noise_multiplier": 1.07, "steps": 22}
    study.add_winner(study_of([0.5], name="other").record(0), charged)
    monkeypatch.setenv("DPSWEEP_OWNER", "bob")
    report("alice/tiny", None, None, None, None)
    assert [place.name for place in tmp_path.glob("**/*.html")] == ["report-alice-tiny.html"]
