"""The winner among methods is named with how even the comparison was, and whether it is noise."""

from itertools import count
from types import SimpleNamespace

import pytest

from dpsweep.results.ranking import Standing, standings, standings_table, verdict

NUMBERS = count()


def record(method, value, state="complete", confirms=None, seed=0, epsilon=4):
    hyperparams = {} if method is None else {"method.name": method}
    config = SimpleNamespace(seed=seed)
    number = next(NUMBERS)
    return SimpleNamespace(
        number=number,
        hyperparams=hyperparams,
        value=value,
        merit=value or 0.0,
        state=state,
        confirms=confirms,
        config=config,
        epsilon=epsilon,
    )


def repeated(method, value, again):
    """A trial, and its repeats with seeds 1, 2, ..."""
    first = record(method, value)
    repeats = [record(method, v, confirms=first.number, seed=i) for i, v in enumerate(again, 1)]
    return [first, *repeats]


def test_methods_are_ranked_by_their_best_complete_trial():
    records = [
        record("disk", 0.90),
        record("disk", 0.75),
        record("fftkf", 0.95),
        record("fftkf", 0.99, "pruned"),
        record("doppler", None, "failed"),
        record("doppler", None, "failed"),
    ]
    table = standings(records, "maximize")
    assert table[:2] == [Standing(4, "fftkf", 2, 0.95, 0.95), Standing(4, "disk", 2, 0.90, 0.825)]
    assert table[2] == Standing(4, "doppler", 2, None, None)
    assert verdict(table) == (
        "fftkf had the best trial under equal trials (2 each): 0.9500, next disk 0.9000. The best "
        "of noisy trials is a lucky one; fresh runs of each method's best tell more (confirm: "
        "{top: 1, seeds: 5, each_method: true})."
    )


def test_least_loss_leads_where_less_is_better():
    table = standings([record("a", 0.2), record("b", 0.0), record("b", 0.4)], "minimize")
    assert [s.method for s in table] == ["b", "a"]
    assert verdict(table).startswith(
        "b had the best trial with unequal trials (1 to 2 a method): 0.0000, next a 0.2000."
    )
    assert verdict(table).endswith(
        "each_of gives every method the same number, if budget.trials is a multiple."
    )


def test_fresh_runs_outrank_a_lucky_trial():
    records = repeated("lucky", 0.95, [0.90, 0.91, 0.90]) + repeated(
        "good", 0.94, [0.93, 0.94, 0.93]
    )
    table = standings(records, "maximize")
    assert [s.method for s in table] == ["good", "lucky"]
    assert table[0].repeats == ((1, 0.93), (2, 0.94), (3, 0.93))
    assert [column.header for column in standings_table(table).columns] == [
        *("method", "trials", "best", "median", "fresh runs", "runs")
    ]


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (
            [0.91, 0.93, 0.92],
            "a is ahead under equal trials (1 each): 0.9200 in 3 fresh runs, next b 0.9133; noise "
            "could do that (p = 0.42).",
        ),
        (
            [0.95, 0.96, 0.95],
            "a is ahead under equal trials (1 each): 0.9533 in 3 fresh runs, next b 0.9133; not by "
            "noise (p = 0.02), but after so few trials maybe by the luck of its search.",
        ),
    ],
)
def test_a_lead_that_noise_could_make_is_no_victory(again, words):
    table = standings(
        repeated("a", 0.9, again) + repeated("b", 0.9, [0.91, 0.91, 0.92]), "maximize"
    )
    assert verdict(table) == words


def test_a_lead_is_won_by_enough_trials_and_a_test_against_all_others():
    a = repeated("a", 0.9, [0.95, 0.96, 0.95]) + [record("a", 0.5) for _ in range(7)]
    b = repeated("b", 0.9, [0.91, 0.91, 0.92]) + [record("b", 0.5) for _ in range(7)]
    c = repeated("c", 0.9, [0.80, 0.95, 0.88]) + [record("c", 0.5) for _ in range(7)]
    assert verdict(standings(a + b, "maximize")).endswith("next b 0.9133 (p = 0.02).")
    assert verdict(standings(a + b, "maximize")).startswith("a won under equal trials (8 each)")
    assert "p = 0.04" in verdict(standings(a + b + c, "maximize")), "Holm's correction"


def test_a_lead_that_pairs_of_runs_deny_is_none():
    a = repeated("a", 0.9, [0.80, 0.81, 0.80, 0.99, 0.99])
    table = standings(a + repeated("b", 0.9, [0.85, 0.86, 0.855]), "maximize")
    assert verdict(table).endswith("next b 0.8550; these runs cannot tell them apart.")


def test_a_method_without_rivals_has_not_won():
    table = standings([*repeated("a", 0.9, [0.9, 0.9]), record("b", None, "failed")], "maximize")
    assert verdict(table) == "Only a has a complete trial, under equal trials (1 each)."


def test_one_fresh_run_each_tells_nothing_apart():
    table = standings(repeated("a", 0.9, [0.95]) + repeated("b", 0.9, [0.9]), "maximize")
    assert verdict(table).endswith(
        "0.9500 in one fresh run, next b 0.9000; these runs cannot tell them apart."
    )


def test_where_some_were_not_repeated_the_best_trials_are_compared():
    table = standings([*repeated("a", 0.9, [0.8, 0.8]), record("b", 0.85)], "maximize")
    assert [s.method for s in table] == ["a", "b"]
    assert verdict(table).startswith("a had the best trial under equal trials (1 each): 0.9000")


def test_each_epsilon_has_its_own_winner():
    records = [
        *(record("a", 0.9, epsilon=8), record("b", 0.7, epsilon=8)),
        *(record("a", 0.5, epsilon=1), record("b", 0.6, epsilon=1)),
    ]
    table = standings(records, "maximize")
    assert [(s.epsilon, s.method) for s in table] == [(1, "b"), (1, "a"), (8, "a"), (8, "b")]
    words = verdict(table)
    assert words.startswith("At epsilon 1, b had the best trial under equal trials (1 each): 0.60")
    assert " At epsilon 8, a had the best trial under equal trials (1 each): 0.9000, next" in words
    assert standings_table(table).columns[0].header == "ε"
    one_method = [record("a", 0.9, epsilon=8), record("a", 0.9, epsilon=1)]
    assert standings(one_method, "maximize") == []


def test_a_search_over_one_method_has_no_winner():
    assert standings([record("disk", 0.9), record("disk", 0.8)], "maximize") == []
    assert standings([record(None, 1.0)], "maximize") == []
    assert verdict([]) == ""
    nobody = standings([record("a", None, "failed"), record("b", None, "failed")], "maximize")
    assert verdict(nobody) == ""
