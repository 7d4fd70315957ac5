"""A sweep over budgets, or after two objectives, recommends more than one trial."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from dpsweep.config.sweep import load_sweep
from dpsweep.results.best_trials import (
    choose_trials,
    list_best_by_budget,
    make_summary_tables,
    name_config_file,
)
from dpsweep.results.export import default_target, origin_of, to_yaml, write
from dpsweep.store.study import Study


@pytest.fixture
def made(tmp_path, sweep_file):
    """A study with the given (accuracy, seconds) of its trials."""

    def make(figures, *settings):
        sweep = load_sweep(sweep_file, ["budget.trials=20", *settings])
        study = Study.create(f"sqlite:///{tmp_path}/study.db", sweep)
        for accuracy, seconds in figures:
            number = study.ask().number
            row = {"epoch": 2, "step": 22, "valid/accuracy": accuracy, "valid/loss": 1.0}
            row |= {"noise_multiplier": 1.2, "privacy/epsilon_spent": 1.0, "seconds": seconds}
            study.report(number, row)
            study.tell(number, "complete")
        return study

    return make


def text(study):
    shown = io.StringIO()
    for table in make_summary_tables(study):
        Console(width=120, file=shown).print(table)
    return shown.getvalue()


EACH = "privacy.epsilon={each: [4, 1]}"


def test_each_budget_has_a_winner_and_a_file_of_its_own(made, tmp_path):
    study = made([(0.9, 1), (0.5, 1), (0.8, 1), (0.7, 1)], EACH)
    assert [(r.number, r.config.privacy.epsilon) for r in list_best_by_budget(study)] == [
        (3, 1),
        (0, 4),
    ]
    assert [r.number for r in choose_trials(study, 1)] == [3, 0]
    assert [r.number for r in choose_trials(study, 5)] == [3, 1, 0, 2]
    places = [name_config_file(r, tmp_path / "best.yaml").name for r in list_best_by_budget(study)]
    assert places == ["best-epsilon-1.yaml", "best-epsilon-4.yaml"]


def test_one_budget_has_one_file(made, tmp_path):
    study = made([(0.5, 1), (0.9, 1)])
    (winner,) = list_best_by_budget(study)
    assert winner.number == 1
    assert name_config_file(winner, tmp_path / "best.yaml") == tmp_path / "best.yaml"
    assert [r.number for r in choose_trials(study, 1)] == [1]
    assert make_summary_tables(study) == []


def test_the_table_by_budget_says_where_more_epsilon_bought_nothing(made):
    shown = text(made([(0.6, 1), (0.7, 1), (0.5, 1), (0.4, 1)], EACH))
    one, four = (line for line in shown.splitlines() if line.strip()[:2] in ("1 ", "4 "))
    assert "0.700" in one
    assert "smaller" not in one
    assert "0.600" in four
    assert "a smaller ε did as well" in four


def test_after_two_objectives_the_front_is_shown_and_exported(made):
    figures = [(0.5, 1), (0.9, 9), (0.4, 5)]
    study = made(figures, "objective={metrics: [valid/accuracy, seconds]}")
    assert [r.number for r in choose_trials(study, 1)] == [1, 0]
    shown = text(study)
    assert "no trial has better valid/accuracy and seconds" in " ".join(shown.split())
    rows = [line.split()[:3] for line in shown.splitlines() if line.strip()[:2] in ("0 ", "1 ")]
    assert rows == [["1", "0.900", "9"], ["0", "0.500", "1"]]


def test_the_best_of_another_sweep_is_not_overwritten(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = made([(0.5, 1), (0.6, 1)], EACH)
    assert default_target("tiny") == Path("best.yaml")
    for record in list_best_by_budget(study):
        write(name_config_file(record, Path("best.yaml")), to_yaml(record, 1, origin_of(study)))
    assert default_target("tiny") == Path("best.yaml")
    assert default_target("other") == Path("best-other.yaml")


def test_the_statement_says_that_pruning_saves_no_privacy(made):
    figures = [(0.5, 1), (0.6, 1)]
    words = "calibrated for its full length, and a trial that is ended early is charged for all"
    assert words in origin_of(made(figures, "pruner.name=median", "name=a")).search_words
    assert words not in origin_of(made(figures, "name=b")).search_words
