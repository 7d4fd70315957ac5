"""The sentences of a promise never say less than was spent, nor promise what is void."""

import math
import re

import pytest

from dpsweep.privacy.statement import search_statement, trial_statement, validation_statement


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


@pytest.mark.parametrize(("adaptive", "kind"), [(True, "adaptive"), (False, "independent")])
def test_search_is_charged_by_composition_of_all_its_trials(adaptive, kind):
    words = search_statement(
        num_trials=30, epsilon=6.181, delta=1e-5, accounting="composition", adaptive=adaptive
    )
    assert words.startswith(f"The search of 30 {kind} trials, all of them looked at: (6.19, 1e-05)")
    assert "Quote this figure" in words


def test_search_that_is_not_charged_says_so_first_and_gives_the_figure_anyway():
    words = search_statement(
        num_trials=30, epsilon=6.181, delta=1e-5, accounting="none", adaptive=True
    )
    assert words.startswith("The search is not charged (accounting: none)")
    assert "(6.19, 1e-05)-DP by composition" in words


def test_search_with_a_trial_without_noise_has_no_privacy():
    words = search_statement(
        num_trials=2, epsilon=math.inf, delta=1e-5, accounting="composition", adaptive=False
    )
    assert "no privacy at all" in words
    assert "inf" not in words


def test_search_without_trials_spent_nothing():
    words = search_statement(
        num_trials=0, epsilon=0.0, delta=1e-5, accounting="composition", adaptive=True
    )
    assert words == "No trial has run, so nothing has been spent."


def test_held_out_examples_are_said_to_be_unprotected():
    words = validation_statement("holdout", 144)
    assert "144 examples held out" in words
    assert "No epsilon above covers those 144 examples." in words
    assert "declares public" in validation_statement("test_split", 0)
