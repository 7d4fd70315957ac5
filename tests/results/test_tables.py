"""What a user wrote is shown as it is, in brackets too: rich reads those as its own tags."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from dpsweep.results.rich_table import plain_table
from dpsweep.results.tables import best_words, run_words, running_table, trial_row, trial_table
from dpsweep.search.confirmation import Confirmation

WIDE = """search={method.kappa: {uniform: [0.3, 1]}, method.gamma: {log_uniform: [0.2, 3]},
    method.cut: {uniform: [0.1, 0.9]}, method.depth: {uniform: [0, 0.9]},
    train.batch_size: {choice: [64, 128]}, optimizer.lr: {log_uniform: [0.3, 3]}}"""


def printed(table, width):
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_table_of_trials_fits_by_leaving_out_columns_and_cuts_no_number(study_of, width):
    study = study_of([0.5 + i / 100 for i in range(12)], WIDE)
    study.store_choice()
    records = study.best()[:3]
    text = printed(trial_table(records, "Best trials"), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    whole = printed(trial_table(records, "Best trials"), 300)
    numbers = set(re.findall(r"\d+\.\d+", text))
    assert numbers <= set(re.findall(r"\d+\.\d+", whole))
    assert {f"{records[0].expected:.3f}", "3.99"} <= numbers
    assert ("no room for loss" in " ".join(text.split())) == (width < 100)


def test_what_may_go_goes_in_order_and_no_sooner_than_it_must():
    table = plain_table("T", spare=("b", "c", "none"), caption="legend")
    for name in "abcd":
        table.add_column(name, justify="right")
    table.add_row(*["1234567"] * 4)
    shown = {width: printed(table, width) for width in (36, 35, 27, 26, 18)}
    assert [text.count("1234567") for text in shown.values()] == [4, 3, 3, 2, 2]
    assert "no room" not in shown[36]
    assert "legend; no room for b" in " ".join(shown[35].split())
    assert "legend; no room for b, c" in " ".join(shown[26].split())
    assert [c.header for c in table.columns] == list("abcd")  # the table itself stays whole


def test_trials_and_repeats_are_told_apart(study_of):
    study = study_of([0.5, 0.6], "confirm={seeds: 2}", repeats=[0.7, 0.8])
    text = printed(trial_table(study.records(), "All"), 120)
    assert text.count("complete, repeats 1") == 2
    assert [trial_row(r)["confirms"] for r in study.records()] == [None, None, 1, 1]
    assert run_words(2, 2, 2, 2) == "2/2 trials + 2/2 repeats"
    assert best_words(study.best()[0]) == "best 0.6000 (trial 1)"
    confirmed = study.confirmed()[1]
    assert best_words(study.best()[0], confirmed) == "best 0.7500 (trial 1, confirmed)"
    assert best_words(None, Confirmation(1, (0.5,), 0)) == "no trial complete yet"


@pytest.mark.parametrize("hyperparams", [1, 8])
def test_a_searched_value_in_brackets_is_shown(study_of, hyperparams):
    record = study_of([0.5]).record(0)
    record = replace(
        record, hyperparams={f"model.arguments.act{i}": "[relu]" for i in range(hyperparams)}
    )
    for table in (running_table([record]), trial_table([record], "Best trials")):
        out = io.StringIO()
        Console(file=out, width=300).print(table)
        assert out.getvalue().count("[relu]") == hyperparams
