"""The search's statement claims no more than is proven, and forgets no run."""

import re
from dataclasses import replace

import numpy as np
import pytest

from dpsweep.config.plan import plan_privacy
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.execution.preflight import make_plan
from dpsweep.privacy.accounting import Run, calibrate_noise, compose_runs
from dpsweep.privacy.search_budget import selection_epsilon
from dpsweep.privacy.statement import format_delta, format_epsilon, search_statement
from dpsweep.search.charge import (
    check_privacy_cap,
    compute_growth,
    compute_search_privacy,
    get_charged_run,
    get_privacy_cap,
    is_within_cap,
    make_ledger_entry,
)
from dpsweep.store.study import Study

RUNS = [Run(0.02, 4.145, 2500)] * 10
TPE, TEN = "sampler.name=tpe", "budget.trials=10"
BATCHES = "search={train.batch_size: {choice: [64, 128]}}"


def planned(sweep, count=None):
    """Budgets of so many random trials of the space."""
    return [plan_privacy(config).run for config in sweep.samples(count or sweep.num_runs)]


def state(sweep, runs, **more):
    return search_statement(compute_search_privacy(sweep, runs, **more))


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
    words = state(sweep, planned(sweep, 10))
    assert claim in words
    assert ("estimate" in words) == ("proven" in words) == estimate


def test_the_figure_is_that_of_the_reference(sweep_file):
    sweep = load_sweep(sweep_file, ["privacy.delta=1e-5", TEN])
    # docs/concepts/accounting.md: ten trials of base epsilon 1 cost 3.27 by PLD.
    assert compose_runs(RUNS, 1e-5) == pytest.approx(3.27, rel=0.01)
    assert f"({format_epsilon(compose_runs(RUNS, 1e-5))}, 1.0e-05)-DP by" in state(sweep, RUNS)
    assert format_epsilon(compose_runs(RUNS[1:], 1e-5)) not in state(sweep, RUNS)


def test_proof_over_varied_lengths_counts_every_planned_run_and_beats_basic_composition(sweep_file):
    sweep = load_sweep(sweep_file, [TPE, TEN, BATCHES])
    runs = planned(sweep)
    each, estimate, proven = figures(state(sweep, runs))
    assert each == 4
    assert estimate == pytest.approx(compose_runs(runs, sweep.written.delta), abs=0.01)
    assert estimate < proven < 40
    ends = [
        calibrate_noise(4.0, sweep.written.delta, rate, steps)[0] for steps, rate in sweep.schedules
    ]
    dearest = max(compose_runs([run] * 10, sweep.written.delta) for run in ends)
    assert dearest < proven < 1.15 * dearest
    assert figures(state(sweep, runs[:4]))[-1] == proven
    more = load_sweep(sweep_file, [TPE, "budget.trials=11", BATCHES])
    assert figures(state(more, runs))[-1] > proven + 0.5


def test_trial_that_breaks_the_cap_is_not_run_and_not_proven_by_it(sweep_file):
    sweep = load_sweep(sweep_file, [TPE, TEN, BATCHES])
    cap, config = get_privacy_cap(sweep), sweep.reference_trial
    assert all(is_within_cap(cap, run) for run in planned(sweep))
    check_privacy_cap(sweep, config)
    loud = config.model_copy(update={"privacy": config.privacy.model_copy(update={"epsilon": 5.0})})
    with pytest.raises(
        ConfigError, match=r"train\.batch_size: 64 with train\.epochs: 2 loses more"
    ):
        check_privacy_cap(sweep, loud)
    runs = [*planned(sweep)[:9], plan_privacy(loud).run]
    assert "by basic composition" in state(sweep, runs)


def test_no_cap_is_needed_where_lengths_do_not_vary(sweep_file):
    sweep = load_sweep(sweep_file, [TPE])
    assert get_privacy_cap(sweep) is None
    assert is_within_cap(None, RUNS[0])


def test_given_noise_is_proven_too(sweep_file):
    settings = [
        TPE,
        TEN,
        "search={train.epochs: {choice: [1, 2]}}",
        "privacy={noise_multiplier: 2}",
    ]
    sweep = load_sweep(sweep_file, settings)
    estimate, proven = figures(state(sweep, planned(sweep)))
    assert estimate < proven < 2 * estimate


def test_search_cut_short_tells_what_all_of_it_costs(sweep_file):
    sweep = load_sweep(sweep_file, [TPE, TEN])
    runs = planned(sweep)
    _, now, all_of_it = figures(state(sweep, runs[:4]))
    _, whole = figures(state(sweep, runs))
    assert now < all_of_it == whole


@pytest.mark.parametrize("settings", [[], [BATCHES]])
def test_shared_budget_is_quoted_while_it_is_kept_and_taken_back_when_not(sweep_file, settings):
    sweep = load_sweep(sweep_file, [TPE, TEN, "privacy.scope=sweep", *settings])
    runs = planned(sweep)
    words = state(sweep, runs)
    assert words.startswith("The budget covers the whole search of 10 runs")
    assert figures(words) == [4.0]
    assert compose_runs(runs, sweep.written.delta) <= 4
    assert "OVER BUDGET" in state(sweep, [*runs, runs[0]])
    quieter = replace(runs[0], noise_multiplier=runs[0].noise_multiplier * 0.99)
    assert "OVER BUDGET" in state(sweep, [quieter, *runs[1:]])


def test_shared_budget_of_trials_alike_is_used_up(sweep_file):
    sweep = load_sweep(sweep_file, [TPE, TEN, "privacy.scope=sweep"])
    assert compose_runs(planned(sweep), sweep.written.delta) == pytest.approx(4, rel=0.02)


def test_shared_budget_pays_for_the_confirming_runs(sweep_file):
    settings = [TPE, TEN, "privacy.scope=sweep", "confirm={top: 2, seeds: 3}"]
    sweep = load_sweep(sweep_file, settings)
    assert sweep.num_runs == 16
    runs = planned(sweep)
    assert compose_runs(runs, sweep.written.delta) == pytest.approx(4, rel=0.02)
    words = state(sweep, runs, confirming=6)
    assert "10 adaptive trials and 6 confirming runs" in words


@pytest.mark.parametrize("space", [[], [BATCHES]])
def test_private_selection_says_one_figure_whatever_was_run(sweep_file, space):
    sweep = load_sweep(sweep_file, [TEN, "accounting=private_selection", *space])
    words = state(sweep, planned(sweep, 3))
    assert words == state(sweep, planned(sweep, 25))
    each, figure = figures(words)
    assert each == 4 < figure < compose_runs(planned(sweep), sweep.written.delta)
    if space:
        assert figure >= selection_epsilon(get_privacy_cap(sweep), 10, sweep.written.delta)[0]


def test_the_ledger_is_charged_and_not_what_was_reported(tmp_path, sweep_file):
    record = Study.create(f"sqlite:///{tmp_path}/study.db", load_sweep(sweep_file)).ask()
    entry = make_ledger_entry(record.config)
    run = plan_privacy(record.config).run
    assert entry == {
        "sampling_rate": run.sampling_rate,
        "noise_multiplier": run.noise_multiplier,
        "steps": run.steps,
    }
    assert get_charged_run(record) == run
    charged = replace(record, charged={**entry, "noise_multiplier": 1.5})
    assert get_charged_run(charged) == replace(run, noise_multiplier=1.5)
    pruned = replace(record, charged=entry, state="pruned", row={"noise_multiplier": 9.0})
    assert get_charged_run(pruned) == run


def test_the_plan_is_never_said_to_cost_less_than_any_part_of_it(sweep_file):
    several = "privacy.epsilon={each: [1, 4]}"
    for settings in ([TPE, TEN], [TPE, TEN, BATCHES], ["sampler.name=random", TEN, BATCHES]):
        sweep = load_sweep(sweep_file, settings)
        runs = planned(sweep)
        plan = figures(state(sweep, [], ahead=10))[-1]
        for begun in (0, 4, 10):
            words = state(sweep, runs[:begun], ahead=10)
            assert "The search of all 10 planned runs over" in words
            assert figures(words)[-1] == plan >= compose_runs(runs[:begun], sweep.written.delta)
        assert figures(state(sweep, [*runs, runs[0]], ahead=10))[-1] > plan
    sweep = load_sweep(sweep_file, [TPE, several, "budget.trials=4"])
    ((steps, rate),) = sweep.schedules
    one, four = (calibrate_noise(e, sweep.written.delta, rate, steps)[0] for e in (1.0, 4.0))
    plan = figures(state(sweep, [], ahead=4))[-1]
    assert plan == pytest.approx(compose_runs([one, four] * 2, sweep.written.delta), abs=0.01)
    assert figures(state(sweep, [four] * 3, ahead=4))[-1] > plan, "repeats of one budget"


@pytest.mark.parametrize("accounting", ["accounting=private_selection", "privacy.scope=sweep"])
def test_a_figure_for_the_whole_search_is_that_of_the_plan(sweep_file, accounting):
    sweep = load_sweep(sweep_file, [TEN, accounting])
    whole = state(sweep, planned(sweep), ahead=10)
    assert figures(state(sweep, [], ahead=10)) == figures(whole)


def test_a_search_that_grew_says_so_and_what_is_proven_of_a_number_that_results_chose(sweep_file):
    sweep = load_sweep(sweep_file, [TEN])
    runs, delta = planned(sweep), sweep.written.delta
    plain = state(sweep, runs, plans=((10, 0),))
    assert plain == state(sweep, runs)
    words = state(sweep, runs, plans=((2, 0), (5, 2), (10, 4)))
    assert (
        "raised when results could be seen: from 2 to 5 when 2 had begun, to 10 when 4 had" in words
    )
    assert f"({format_epsilon(compose_runs(runs, delta))}, " in words
    one_of_72 = compose_runs(runs, delta / 72)  # 8 more than planned at first: 8 * 9
    assert f"is proven: ({format_epsilon(one_of_72)}, {format_delta(2 * delta)})-DP for 10" in words
    part = state(sweep, runs[:4], plans=((2, 0), (10, 4)))
    assert f"is proven: ({format_epsilon(one_of_72)}, " in part, "all that are planned count"
    extra = state(sweep, [*runs, runs[0]], plans=((2, 0), (10, 4)))
    of_eleven = f"({format_epsilon(compose_runs([*runs, runs[0]], delta / 90))}, "
    assert of_eleven in extra
    assert of_eleven in state(sweep, runs[:4], plans=((2, 0), (10, 4)), ahead=11)


def test_nine_runs_that_were_planned_as_one_cost_what_the_guide_says(sweep_file):
    settings = ["train.batch_size=128", "train.epochs=20", "privacy.epsilon=4"]
    nine = load_sweep(sweep_file, [*settings, "budget.trials=9"])
    run, delta = plan_privacy(nine.written).run, nine.written.delta
    assert format_epsilon(compose_runs([run] * 9, delta)) == "15.41"
    grown = compute_growth(nine, [run] * 9, ((1, 0), (9, 1)), 9)
    assert (format_epsilon(grown.epsilon), grown.delta) == ("18.99", 2 * delta)


def test_a_number_of_runs_that_results_choose_keeps_the_ex_post_guarantee_and_no_naive_one(
    sweep_file,
):
    """One full-batch Gaussian step a run, whose loss is known; runs are added until one bites.

    The worst stopping rule ends as soon as the loss L_n exceeds e_n. Then P(S) - E'[exp(e_N); S]
    is E[(1 - exp(e_N - L_N))+], which 200,000 draws give to 0.001 (3 standard deviations, a false
    alarm in 700): 0.025 of the 0.04 allowed. The composed figures at full delta reach 0.056.
    """
    one_step = ["train.batch_size=1437", "train.epochs=1", "privacy={noise_multiplier: 1}"]
    settings = [*one_step, "privacy.delta=0.02"]
    most, delta, num = 12, 0.02, 200_000
    sweeps = [load_sweep(sweep_file, [*settings, f"budget.trials={n}"]) for n in range(1, most + 1)]
    (run,) = {plan_privacy(sweep.written).run for sweep in sweeps}
    assert (run.sampling_rate, run.steps) == (1.0, 1)
    grown = [compute_growth(s, [run] * n, ((1, 0), (n, 1)), n) for n, s in enumerate(sweeps, 1)]
    assert [g.delta for g in grown] == [delta] + [2 * delta] * (most - 1)
    naive = [compose_runs([run] * n, delta) for n in range(1, most + 1)]
    rng = np.random.default_rng(0)
    steps = rng.normal(0.5, 1.0, size=(num, most))  # of the loss, at sigma 1 and sensitivity 1
    loss = steps.cumsum(axis=1)

    def beyond(epsilons):
        over = 1 - np.exp(np.array(epsilons) - loss)
        ended = (over > 0).argmax(axis=1)
        return np.maximum(over[np.arange(num), ended], 0).mean()

    assert beyond([g.epsilon for g in grown]) < 2 * delta + 0.001
    assert beyond(naive) > 2 * delta + 0.001


@pytest.mark.parametrize("budgets", [[8, 8.01], [4, 4.005]])
def test_budgets_that_lie_close_are_counted_apart(sweep_file, budgets):
    """Noise in three digits told them apart: half of the runs were counted."""
    sweep = load_sweep(
        sweep_file, [TPE, "budget.trials=20", f"privacy.epsilon={{each: {budgets}}}"]
    )
    runs = planned(sweep)
    whole = compose_runs([run for run in runs[:2] for _ in range(10)], sweep.written.delta)
    assert compute_search_privacy(sweep, [], ahead=20).epsilon == pytest.approx(whole, rel=0.01)
    cut_short = compute_search_privacy(sweep, runs[:12])
    assert cut_short.largest[0] == pytest.approx(whole, rel=0.01)


def test_a_run_that_another_machine_calibrated_is_of_its_budget(sweep_file):
    sweep = load_sweep(sweep_file, [TPE, "budget.trials=4", "privacy.epsilon={each: [1, 8]}"])
    dear = min(planned(sweep, 8), key=lambda run: run.noise_multiplier)
    near = replace(dear, noise_multiplier=0.999 * dear.noise_multiplier)
    whole = compute_search_privacy(sweep, [], ahead=4).epsilon
    assert whole < compute_search_privacy(sweep, [near], ahead=4).epsilon < 1.01 * whole


def test_a_plan_counts_the_runs_of_each_budget(sweep_file):
    """It took the first corners of the space: 1.46 for a run at 1 and one at 8."""
    sweep = load_sweep(sweep_file, [TPE, "budget.trials=2", "privacy.epsilon={each: [1, 8]}"])
    (found,) = figures(make_plan(sweep, 1).search_words)
    assert found >= 8


def test_a_plan_without_noise_says_that_it_is_not_private(sweep_file):
    settings = ["privacy={noise_multiplier: 0}", BATCHES, TPE]
    sweep = load_sweep(sweep_file, settings)
    words = search_statement(compute_search_privacy(sweep, [], ahead=sweep.num_runs))
    assert words.startswith("NOT PRIVATE")
