"""The comparison of the ways to spend one epsilon is that of the reference, and advises by it."""

import pytest

from dpsweep.cli.verbs.plan import show_ways
from dpsweep.config.plan import plan_privacy
from dpsweep.config.sweep import load_sweep
from dpsweep.execution.preflight import ways_of
from dpsweep.privacy.statement import format_epsilon
from dpsweep.privacy.ways import FEW_RUNS, ways_to_spend
from dpsweep.training.check import check_sweep


def test_reference_at_a_total_of_4_for_twenty_trials():
    ways = ways_to_spend(4.0, 1e-5, ((2500, 0.02),), 20, share=0.0975)
    assert ways.equal == pytest.approx((0.76, 0.76), abs=0.006)
    assert ways.explore == pytest.approx((3.79, 3.79), abs=0.01)
    # 1.67 by Renyi alone; profiles leave more
    assert ways.selection == pytest.approx((2.32, 2.32), abs=0.01)
    assert max(ways.each) < 0.3
    usual = ways_to_spend(4.0, 1e-5, ((2500, 0.02),), 20)
    assert usual.explore == pytest.approx((3.89, 3.89), abs=0.01)


def test_the_way_that_leaves_most_is_advised_where_trials_are_many():
    many, few = (ways_to_spend(4.0, 1e-5, ((300, 0.1),), n) for n in (12, FEW_RUNS))
    assert many.equal[0] < many.selection[0] < many.explore[0] < 4
    assert "For 12 trials explore-then-train suits best: budget: {explore: {trials: 12" in (
        many.advice
    )
    assert "For 2 trials equal shares do well" in few.advice
    varied = ways_to_spend(4.0, 3.4e-4, ((5, 0.356), (179, 0.0111)), 3, vary=True)
    assert varied.explore[0] < varied.selection[0], "by Renyi, which is looser"
    assert "another way leaves more: fix train.batch_size" in varied.advice
    assert "another way" not in many.advice


SHARED = "privacy.scope=sweep"


def test_plan_prints_what_each_way_leaves_of_the_sweeps_epsilon(sweep_file):
    sweep = load_sweep(sweep_file, [SHARED, "budget={explore: {trials: 9, share: 0.1}}"])
    ways = ways_of(sweep)
    assert ways == ways_to_spend(4.0, sweep.written.delta, sweep.schedules, 9, 0.1)
    words = show_ways(ways)
    assert "4 for all 9 trials together would leave the model that is released" in words
    for figure, way in ((ways.equal, "equal shares"), (ways.explore, "explore-then-train")):
        assert f"{format_epsilon(figure[0])} by {way}" in words


def test_what_explore_leaves_is_what_the_final_run_has_at_each_batch_size(sweep_file):
    settings = [
        SHARED,
        "budget={explore: {trials: 6}}",
        "search={train.batch_size: {choice: [64, 512]}}",
    ]
    sweep = load_sweep(sweep_file, settings)
    own = [plan_privacy(sweep.final(sweep.exploring(corner))).epsilon for corner in sweep.corners]
    ways = ways_of(sweep)
    assert ways.explore == pytest.approx((min(own), max(own)), rel=1e-3)
    assert ways.explore[0] < ways.explore[1]
    low, high = map(format_epsilon, ways.explore)
    assert f"{low} to {high} by explore-then-train" in show_ways(ways)


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


def test_a_share_that_leaves_less_than_another_way_is_not_advised():
    ways = ways_to_spend(4.0, 1e-5, ((300, 0.1),), 3, 0.9)
    assert ways.explore[1] < ways.equal[0]
    assert ways.advice.startswith("With a share of 0.9 explore-then-train leaves less than another")
