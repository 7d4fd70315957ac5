"""status tells trials from repeats, and the confirmed figure from the one first observed."""

import json
import re

import pytest

from dpsweep.cli.verbs.sweeps import best, status
from dpsweep.cli.verbs.watch import watch
from dpsweep.config.sweep import load_sweep
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.statement import describe_search_privacy
from dpsweep.store.study import Study, open_study


@pytest.fixture
def state(tmp_path, sweep_file):
    """A sweep with two complete trials, and one of the two repeats of the better one."""
    state = StateFolder(tmp_path / "state")
    sweep, folder = load_sweep(sweep_file, ["confirm={seeds: 2}"]), state.sweep("tiny")
    folder.create(sweep.file, sweep.base, None)
    study = Study.create(folder.storage_uri, sweep, folder.id)
    for ask, accuracy in ((study.ask, 0.5), (study.ask, 0.9), (study.ask_to_confirm, 0.7)):
        number = ask().number
        row = {"epoch": 2, "valid/accuracy": accuracy, "valid/loss": 1.0, "seconds": 1.0}
        study.report(
            number, row | {"noise_multiplier": 1.2, "privacy/epsilon_spent": 4.0, "step": 22}
        )
        study.tell(number, "complete")
    return state


def test_all_sweeps_in_a_table_and_for_programs(state, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status(None, str(state.root), as_json=False)
    shown = capsys.readouterr().out
    assert "2/2 + 1/2" in shown
    assert "0.7000" in shown
    assert max(map(len, shown.splitlines())) <= 80
    status(None, str(state.root), as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["ended"], row["trials"]) == (2, 2)
    assert (row["ended_repeats"], row["repeats"]) == (1, 2)
    assert (row["best"], row["confirmed"]) == (0.7, True)


def test_the_trials_of_one_say_which_they_repeat(state, capsys):
    status("tiny", str(state.root), as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["confirms"] for row in rows] == [None, None, 1]
    status("tiny", str(state.root), as_json=False)
    assert "complete, repeats 1" in capsys.readouterr().out


def test_best_prints_two_numbers_and_a_short_statement(state, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    best("tiny", str(state.root), 5, as_json=False)
    said = capsys.readouterr().out
    lines = said[said.index("ε 4.00 trial") :].splitlines()
    assert re.match(r"ε 4\.00 trial 1 alone, ε [\d.]+ the whole search \(δ 3\.4e-04\)", lines[0])
    assert len(lines) <= 6, "fits under the table"
    words = " ".join(lines)
    assert "(4.00, 3.4e-04)-differentially private" in words
    assert "Other sweeps and runs on the same data are not counted" in words
    assert words.endswith("whole statement: dpsweep report tiny")


def test_an_ascii_terminal_gets_letters_spelled_out(state, shell, clean):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = shell(clean)("best", "tiny", "--state", state.root, **ascii_only)
    assert said.isascii()
    assert "eps 4.00 trial 1 alone" in said
    assert "+-" in said  # between mean and standard deviation
    assert shell(clean)("init", "--list", **ascii_only).isascii()


def test_of_a_void_search_the_whole_statement_is_printed(state, capsys):
    open_study("tiny", state).note_test_secret()
    best("tiny", str(state.root), 5, as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    assert describe_search_privacy(open_study("tiny", state)) in said


def test_status_and_watch_say_where_to_look_while_the_sweep_runs(state, capsys):
    folder = state.sweep("tiny")
    folder.note_dashboard("http://head:8265")
    with folder.lease():
        status("tiny", str(state.root), as_json=False)
        assert "Ray: http://head:8265" in capsys.readouterr().out
    status("tiny", str(state.root), as_json=False)
    assert "8265" not in capsys.readouterr().out, "that cluster may be gone"
    watch("tiny", str(state.root), None)
    assert "8265" not in capsys.readouterr().out


def test_a_tracking_servers_address_is_shown_without_its_password(tmp_path, sweep_file, capsys):
    state = StateFolder(tmp_path / "tracked")
    sweep, folder = load_sweep(sweep_file), state.sweep("tiny")
    folder.create(sweep.file, sweep.base, "http://me:secret@mlflow:5000")
    Study.create(folder.storage_uri, sweep, folder.id)
    status("tiny", str(state.root), as_json=False)
    said = capsys.readouterr().out
    assert "MLflow: http://" in said
    assert "mlflow:5000" in said
    assert "secret" not in said
