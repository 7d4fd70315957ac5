"""The comparison of the ways to spend one epsilon is that of the reference, and advises by it."""

import pytest

from dpsweep.cli.verbs.plan import show_ways
from dpsweep.config.sweep import load_sweep
from dpsweep.execution.preflight import ways_of
from dpsweep.privacy.statement import format_epsilon
from dpsweep.privacy.ways import FEW_RUNS, ways_to_spend
from dpsweep.training.check import check_sweep


def test_reference_at_a_total_of_4_for_twenty_trials():
    ways = ways_to_spend(4.0, 1e-5, (2500, 0.02), 20, share=0.0975)
    assert ways.equal == pytest.approx(0.76, abs=0.006)
    assert ways.explore == pytest.approx(3.79, abs=0.01)
    # 1.67 by Renyi alone (test_selection.py's bound); profiles leave more.
    assert 1.67 < ways.selection < 2.6
    assert ways.each < 0.3


def test_the_way_that_leaves_most_is_advised_where_trials_are_many():
    many, few = (ways_to_spend(4.0, 1e-5, (300, 0.1), n) for n in (12, FEW_RUNS))
    assert many.equal < many.selection < many.explore < 4
    assert "For 12 trials explore-then-train suits best: budget: {explore: {trials: 12" in (
        many.advice
    )
    assert "For 3 trials equal shares do well" in few.advice


SHARED = "privacy.scope=sweep"


def test_plan_prints_what_each_way_leaves_of_the_sweeps_epsilon(sweep_file):
    sweep = load_sweep(sweep_file, [SHARED, "budget={explore: {trials: 9, share: 0.1}}"])
    ways = ways_of(sweep)
    assert ways == ways_to_spend(4.0, sweep.written.delta, sweep.schedules[0], 9, 0.1)
    words = show_ways(ways)
    assert "4 for all 9 trials together would leave the model that is released" in words
    for figure, way in ((ways.equal, "equal shares"), (ways.explore, "explore-then-train")):
        assert f"{format_epsilon(figure)} by {way}" in words


@pytest.mark.parametrize(
    "settings",
    [
        ["budget.trials=1"],
        ["privacy.epsilon={each: [1, 2]}"],
        ["privacy={noise_multiplier: 1}"],
    ],
)
def test_there_is_nothing_to_compare_without_one_epsilon_that_can_be_shared(sweep_file, settings):
    assert ways_of(load_sweep(sweep_file, settings)) is None


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ([SHARED, "budget.trials=12"], True),
        ([SHARED, "budget.trials=2", "confirm={top: 2, seeds: 5}"], True),
        ([SHARED, "budget.trials=8"], False),
        ([SHARED, "budget={explore: {trials: 12}}"], False),
        (["budget.trials=12"], False),
    ],
)
def test_many_equal_shares_are_warned_of(sweep_file, settings, warned):
    words = " ".join(check_sweep(load_sweep(sweep_file, settings)))
    assert ("runs an equal share of epsilon" in words) == warned
    assert ("budget: {explore: {trials:" in words) == warned
