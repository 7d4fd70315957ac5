"""The sentences of a promise never say less than was spent, nor promise what is void."""

import math
import re
from dataclasses import replace

import pytest

from dpsweep.privacy.statement import (
    Growth,
    SearchSpending,
    format_delta,
    search_statement,
    trial_statement,
    validation_statement,
)


def trial(epsilon: float = 3.998, *, void: bool = False) -> str:
    return trial_statement(
        epsilon=epsilon, delta=6.8e-6, num_examples=50_000, noise_multiplier=1.07, void=void
    )


@pytest.mark.parametrize("epsilon", [0.001, 0.9142, 1.0, 2.5, 3.998, 4.0001, 12.345])
def test_printed_epsilon_is_rounded_up_to_two_decimals(epsilon):
    (printed,) = re.match(r"\(([\d.]+), 6\.8e-06\)-differentially private", trial(epsilon)).groups()
    assert epsilon <= float(printed) < min(epsilon + 0.01, 1.1 * epsilon)
    assert len(printed.split(".")[1]) == (2 if epsilon >= 0.1 else 4)


def test_promise_names_neighbours_examples_noise_and_accountant():
    words = trial()
    for part in ("adding or removing any one of 50000", "noise multiplier 1.07", "PLD", "Poisson"):
        assert part in words


@pytest.mark.parametrize("epsilon", [1.0, math.inf])
def test_fixed_secret_promises_nothing(epsilon):
    words = trial(epsilon, void=True)
    assert words.startswith("VOID: trained with a fixed test secret.")
    assert "private for" not in words


def test_no_noise_promises_nothing():
    assert trial(math.inf).startswith("NOT PRIVATE: trained without noise.")


def search(**changes) -> str:
    spent = SearchSpending(num_runs=30, planned=30, epsilon=6.181, delta=1.02e-5, each=1.0)
    return search_statement(replace(spent, **changes))


@pytest.mark.parametrize(("adaptive", "kind"), [(True, "adaptive"), (False, "independent")])
def test_search_is_charged_by_composition_of_all_its_trials(adaptive, kind):
    words = search(adaptive=adaptive)
    assert words.startswith(
        f"Each trial: (1.00, 1.1e-05)-DP. The search of 30 {kind} trials over a public test "
        f"split, all of them looked at, and any choice among them: (6.19, 1.1e-05)-DP"
    )
    assert "(6.19, 1.1e-05)-DP by composition of the runs (PLD)" in words
    assert "Other sweeps and runs on the same data are not counted." in words


def test_search_whose_runs_were_chosen_on_the_way_gives_the_proven_figure_too():
    words = search(proven=(8.111, 1.02e-5), how="RDP at order 3, fixed beforehand")
    assert "an estimate; proven for all 30 is (8.12, 1.1e-05)-DP by RDP at order 3, fixed" in words
    assert "estimate" not in search()
    assert "an estimate; nothing is proven, since a trial lost more" in search(
        proven=(math.inf, 1.0)
    )


def test_search_that_was_cut_short_says_what_it_costs_to_the_end():
    words = search(num_runs=12, to_the_end=9.0)
    assert "The search of 12 adaptive trials" in words
    assert "all 30 planned runs count: (9.00, 1.1e-05)-DP." in words
    assert "planned runs" not in search()


def test_confirming_runs_are_told_apart_from_trials():
    assert "The search of 24 adaptive trials and 6 confirming runs over" in search(confirming=6)


def test_shared_budget_covers_the_whole_search():
    words = search(shared=True, epsilon=4.0, num_runs=28, confirming=6, how="(PLD)", each=None)
    assert words.startswith(
        "The budget covers the whole search of 30 runs, all of them looked at, and any choice "
        "among them: (4.00, 1.1e-05)-DP by composition (PLD). Counted: 22 adaptive trials and 6 "
    )
    assert "Each trial" not in words


def test_broken_shared_budget_comes_first():
    assert search(broken=4.0).startswith("OVER BUDGET: the sweep allows (4.00, 1.1e-05)-DP for")


@pytest.mark.parametrize("num_runs", [0, 17, 41])
def test_private_selection_tells_the_law_and_never_the_number(num_runs):
    found = {"accounting": "private_selection", "epsilon": 2.411, "how": "privacy profiles"}
    words = search(**found, num_runs=num_runs)
    assert "releasing the best of its random trials and nothing of the others" in words.lower()
    assert "(2.42, 1.1e-05)-DP by private selection (privacy profiles)" in words
    assert "geometric law with mean 30; like every other trial's results, it must stay" in words
    assert words == search(**found, num_runs=5)


def test_search_that_is_not_charged_says_so_and_gives_the_figure_anyway():
    words = search(accounting="none")
    assert "accounting: none, which quotes the chosen trial's own figure" in words
    assert "(6.19, 1.1e-05)-DP by composition" in words


def test_search_with_a_trial_without_noise_has_no_privacy():
    assert search(epsilon=math.inf) == "NOT PRIVATE: the search trained without noise."


def test_search_with_a_test_secret_promises_nothing():
    assert search(void=True).startswith("VOID: ")
    assert "DP by" not in search(void=True)


def test_search_without_trials_spent_nothing():
    assert search(num_runs=0) == "No trial has run, so nothing has been spent."


def test_held_out_examples_are_said_to_be_unprotected_by_trial_and_search():
    words = validation_statement("holdout", 144)
    assert "144 examples held out" in words
    assert "No epsilon covers those 144 examples." in words
    assert "144 held-out examples without noise" in search(num_held_out=144)
    units = search(num_held_out=9, units="units")
    assert "9 held-out units without noise; no epsilon covers them." in units
    assert "declares public" in validation_statement("test_split", 0)


@pytest.mark.parametrize("delta", [6.68e-6, 5.5466e-6, 1e-5, 3.3635e-4, 9.99e-7])
def test_printed_delta_is_rounded_up_to_two_digits(delta):
    assert delta <= float(format_delta(delta)) * (1 + 1e-12) <= 1.1 * delta


@pytest.mark.parametrize(
    ("known", "largest"),
    [
        ({}, (3.0, 1e-5)),
        ({"proven": (4.0, 2e-5)}, (4.0, 2e-5)),
        ({"proven": (2.0, 2e-5)}, (3.0, 1e-5)),
        ({"to_the_end": 5.0}, (5.0, 1e-5)),
        ({"growth": Growth(((2, 0), (5, 2)), 5, 6.0, 2e-5), "to_the_end": 5.0}, (6.0, 2e-5)),
        ({"proven": (math.inf, 1.0)}, (math.inf, 1.0)),
    ],
)
def test_the_figure_that_is_read_first_is_the_largest_of_the_statement(known, largest):
    assert (
        SearchSpending(num_runs=2, planned=5, epsilon=3.0, delta=1e-5, **known).largest == largest
    )
