"""The sentences of a promise never say less than was spent, nor promise what is void."""

import math
import re
from dataclasses import replace

import pytest

from dpsweep.privacy.statement import (
    Search,
    search_statement,
    shown_delta,
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
    assert epsilon <= float(printed) < epsilon + 0.01
    assert len(printed.split(".")[1]) == 2


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
    told = {"accounting": "composition", "num_held_out": 0}
    told.update({k: changes.pop(k) for k in list(changes) if k in told})
    spent = Search(num_trials=30, epsilon=6.181, delta=1.02e-5, adaptive=True)
    return search_statement(replace(spent, **changes), **told)


@pytest.mark.parametrize(("adaptive", "kind"), [(True, "adaptive"), (False, "independent")])
def test_search_is_charged_by_composition_of_all_its_trials(adaptive, kind):
    words = search(adaptive=adaptive)
    assert words.startswith(
        f"The search of 30 {kind} trials, all of them looked at, and any choice"
    )
    assert "(6.19, 1.1e-05)-DP by composition of the runs (PLD)" in words
    assert "Other sweeps and runs on the same data are not counted." in words


def test_search_whose_runs_were_chosen_on_the_way_gives_the_proven_figure_too():
    words = search(proven=(120.0, 3.06e-4))
    assert "that figure is an estimate; proven is (120.00, 3.1e-04)-DP by basic" in words
    assert "estimate" not in search()
    assert "an estimate; nothing is proven, since the noise was given" in search(
        proven=(math.inf, 1.0)
    )


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
    assert search(num_trials=0) == "No trial has run, so nothing has been spent."


def test_held_out_examples_are_said_to_be_unprotected_by_trial_and_search():
    words = validation_statement("holdout", 144)
    assert "144 examples held out" in words
    assert "No epsilon covers those 144 examples." in words
    assert "144 held-out examples without noise" in search(num_held_out=144)
    assert "declares public" in validation_statement("test_split", 0)


@pytest.mark.parametrize("delta", [6.68e-6, 5.5466e-6, 1e-5, 3.3635e-4, 9.99e-7])
def test_printed_delta_is_rounded_up_to_two_digits(delta):
    assert delta <= float(shown_delta(delta)) * (1 + 1e-12) <= 1.1 * delta
