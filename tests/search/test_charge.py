"""The search's statement claims no more than is proven, and forgets no run."""

import re
from dataclasses import replace

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.privacy.accounting import Run, calibrate, compose
from dpsweep.privacy.selection import total
from dpsweep.privacy.statement import shown_epsilon
from dpsweep.search.charge import (
    cap_of,
    check_within,
    ledger_entry,
    run_of,
    search_promise,
    within,
)
from dpsweep.store.study import Study
from dpsweep.training.budget import budget

RUNS = [Run(0.02, 4.145, 2500)] * 10
TPE, TEN = "sampler.name=tpe", "budget.trials=10"
BATCHES = "search={train.batch_size: {choice: [64, 128]}}"


def planned(sweep, count=None):
    """Budgets of so many random trials of the space."""
    return [budget(config).run for config in sweep.samples(count or sweep.num_runs)]


def figures(words):
    return [float(x) for x in re.findall(r"\(([\d.]+), [\d.e-]+\)-DP", words)]


@pytest.mark.parametrize(
    ("settings", "claim", "estimate"),
    [
        ([TPE], "10 adaptive trials", False),
        (["sampler.name=random"], "10 independent trials", False),
        (["pruner.name=median"], "10 adaptive trials", False),
        ([TPE, BATCHES], "10 adaptive trials", True),
        (["sampler.name=random", BATCHES], "10 independent trials", False),
        (["confirm={top: 1, seeds: 2}", BATCHES], "10 adaptive trials", True),
    ],
)
def test_what_is_proven_depends_on_who_chose_the_runs(sweep_file, settings, claim, estimate):
    sweep = load_sweep(sweep_file, [TEN, *settings])
    words = search_promise(sweep, planned(sweep, 10))
    assert claim in words
    assert ("estimate" in words) == ("proven" in words) == estimate


def test_the_figure_is_that_of_the_reference(sweep_file):
    sweep = load_sweep(sweep_file, ["privacy.delta=1e-5", TEN])
    # METHODS.md section 4: ten trials of base epsilon 1 cost 3.27 by PLD.
    assert compose(RUNS, 1e-5) == pytest.approx(3.27, rel=0.01)
    assert f"({shown_epsilon(compose(RUNS, 1e-5))}, 1.0e-05)-DP by" in search_promise(sweep, RUNS)
    assert shown_epsilon(compose(RUNS[1:], 1e-5)) not in search_promise(sweep, RUNS)


def test_proof_over_varied_lengths_counts_every_planned_run_and_beats_basic_composition(sweep_file):
    sweep = load_sweep(sweep_file, [TPE, TEN, BATCHES])
    runs = planned(sweep)
    each, estimate, proven = figures(search_promise(sweep, runs))
    assert each == 4
    assert estimate == pytest.approx(compose(runs, sweep.written.delta), abs=0.01)
    assert estimate < proven < 40
    ends = [calibrate(4.0, sweep.written.delta, rate, steps)[0] for steps, rate in sweep.schedules]
    dearest = max(compose([run] * 10, sweep.written.delta) for run in ends)
    assert dearest < proven < 1.15 * dearest
    assert figures(search_promise(sweep, runs[:4]))[-1] == proven
    more = load_sweep(sweep_file, [TPE, "budget.trials=11", BATCHES])
    assert figures(search_promise(more, runs))[-1] > proven + 0.5


def test_trial_that_breaks_the_cap_is_not_run_and_not_proven_by_it(sweep_file):
    sweep = load_sweep(sweep_file, [TPE, TEN, BATCHES])
    cap, config = cap_of(sweep), sweep.promise
    assert all(within(cap, run) for run in planned(sweep))
    check_within(sweep, config)
    loud = config.model_copy(update={"privacy": config.privacy.model_copy(update={"epsilon": 5.0})})
    with pytest.raises(
        ConfigError, match=r"train\.batch_size: 64 with train\.epochs: 2 loses more"
    ):
        check_within(sweep, loud)
    runs = [*planned(sweep)[:9], budget(loud).run]
    assert "by basic composition" in search_promise(sweep, runs)


def test_no_cap_is_needed_where_lengths_do_not_vary(sweep_file):
    sweep = load_sweep(sweep_file, [TPE])
    assert cap_of(sweep) is None
    assert within(None, RUNS[0])


def test_given_noise_is_proven_too(sweep_file):
    settings = [
        TPE,
        TEN,
        "search={train.epochs: {choice: [1, 2]}}",
        "privacy={noise_multiplier: 2}",
    ]
    sweep = load_sweep(sweep_file, settings)
    estimate, proven = figures(search_promise(sweep, planned(sweep)))
    assert estimate < proven < 2 * estimate


def test_search_cut_short_tells_what_all_of_it_costs(sweep_file):
    sweep = load_sweep(sweep_file, [TPE, TEN])
    runs = planned(sweep)
    _, now, all_of_it = figures(search_promise(sweep, runs[:4]))
    _, whole = figures(search_promise(sweep, runs))
    assert now < all_of_it == whole


@pytest.mark.parametrize("settings", [[], [BATCHES]])
def test_shared_budget_is_quoted_while_it_is_kept_and_taken_back_when_not(sweep_file, settings):
    sweep = load_sweep(sweep_file, [TPE, TEN, "privacy.scope=sweep", *settings])
    runs = planned(sweep)
    words = search_promise(sweep, runs)
    assert words.startswith("The budget covers the whole search of 10 runs")
    assert figures(words) == [4.0]
    assert compose(runs, sweep.written.delta) <= 4
    assert "OVER BUDGET" in search_promise(sweep, [*runs, runs[0]])
    quieter = replace(runs[0], noise_multiplier=runs[0].noise_multiplier * 0.99)
    assert "OVER BUDGET" in search_promise(sweep, [quieter, *runs[1:]])


def test_shared_budget_of_trials_alike_is_used_up(sweep_file):
    sweep = load_sweep(sweep_file, [TPE, TEN, "privacy.scope=sweep"])
    assert compose(planned(sweep), sweep.written.delta) == pytest.approx(4, rel=0.02)


def test_shared_budget_pays_for_the_confirming_runs(sweep_file):
    settings = [TPE, TEN, "privacy.scope=sweep", "confirm={top: 2, seeds: 3}"]
    sweep = load_sweep(sweep_file, settings)
    assert sweep.num_runs == 16
    runs = planned(sweep)
    assert compose(runs, sweep.written.delta) == pytest.approx(4, rel=0.02)
    words = search_promise(sweep, runs, confirming=6)
    assert "10 adaptive trials and 6 confirming runs" in words


@pytest.mark.parametrize("space", [[], [BATCHES]])
def test_private_selection_says_one_figure_whatever_was_run(sweep_file, space):
    sweep = load_sweep(sweep_file, [TEN, "accounting=private_selection", *space])
    words = search_promise(sweep, planned(sweep, 3))
    assert words == search_promise(sweep, planned(sweep, 25))
    each, figure = figures(words)
    assert each == 4 < figure < compose(planned(sweep), sweep.written.delta)
    if space:
        assert figure >= total("private_selection", cap_of(sweep), 10, sweep.written.delta)[0]


def test_the_ledger_is_charged_and_not_what_was_reported(tmp_path, sweep_file):
    record = Study.create(f"sqlite:///{tmp_path}/study.db", load_sweep(sweep_file)).ask()
    entry = ledger_entry(record.config)
    run = budget(record.config).run
    assert entry == {
        "sampling_rate": run.sampling_rate,
        "noise_multiplier": run.noise_multiplier,
        "steps": run.steps,
    }
    assert run_of(record) == run
    charged = replace(record, charged={**entry, "noise_multiplier": 1.5})
    assert run_of(charged) == replace(run, noise_multiplier=1.5)
    pruned = replace(record, charged=entry, state="pruned", row={"noise_multiplier": 9.0})
    assert run_of(pruned) == run
