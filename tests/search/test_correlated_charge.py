"""Correlated noise is charged as ceil(T / b) steps at rate b B / N, wherever a run is charged."""

from dataclasses import asdict

import pytest

from dpsweep.config.plan import plan_privacy, statement_of_trial
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.privacy.accounting import Run, calibrate_noise
from dpsweep.privacy.statement import search_statement
from dpsweep.search.charge import (
    compute_search_privacy,
    get_charged_run,
    get_privacy_cap,
    is_within_cap,
    make_ledger_entry,
)
from dpsweep.training.schedule import TrialSchedule, resolve_trial_schedule

BANDMF = "base.method={name: bandmf, bands: 4}"
BOTH = "search={method: {one_of: [{name: dp_sgd}, {name: bandmf, bands: 4}]}}"
BANDS = "search={method.bands: {choice: [1, 2, 4]}}"
MANY = "search={method.bands: {integer: [1, 16]}}"
SHARED = "base.privacy={epsilon: 4, scope: sweep}"
SELECTION = [
    "accounting=private_selection",
    "sampler={name: random}",
    "pruner={name: none}",
    "confirm=null",
]


def open_sweep(sweep_file, *settings):
    return load_sweep(sweep_file, ["budget.trials=4", BANDMF, *settings])


def counted(config, bands):
    """Rounds and rate, from the numbers of the file."""
    num, batch = config.data.num_examples, config.train.batch_size
    steps = max(1, round(config.train.epochs * num / batch))
    return -(-steps // bands), bands * batch / num


def test_a_trial_is_calibrated_for_its_rounds_at_the_rate_of_its_group(sweep_file):
    config = open_sweep(sweep_file, "search={optimizer.lr: {choice: [1, 2]}}").reference_trial
    rounds, rate = counted(config, 4)
    assert config.steps_and_rate == (rounds, rate)
    plan = plan_privacy(config)
    assert plan.run == calibrate_noise(4.0, config.delta, rate, rounds)[0]
    assert plan.steps == config.num_steps > plan.run.steps
    assert plan.run.epsilon(plan.delta) <= 4
    # what (T, q) would have given is not enough
    wrong, _ = calibrate_noise(4.0, config.delta, plan.sampling_rate / 4, plan.steps)
    assert Run(rate, wrong.noise_multiplier, rounds).epsilon(plan.delta) > 4.5
    entry = make_ledger_entry(config)
    assert entry == {
        "sampling_rate": rate,
        "noise_multiplier": plan.run.noise_multiplier,
        "steps": rounds,
    }


def test_reports_spend_by_rounds_and_a_worker_is_sent_the_correlation(sweep_file):
    config = open_sweep(sweep_file, "search={optimizer.lr: {choice: [1, 2]}}").reference_trial
    schedule = resolve_trial_schedule(config)
    assert schedule.reports[-1].step == config.num_steps
    run = schedule.plan.run
    for report in schedule.reports[:-1]:
        done = Run(run.sampling_rate, run.noise_multiplier, -(-report.step // 4))
        assert report.epsilon == pytest.approx(done.epsilon(config.delta), abs=0.01)
    assert TrialSchedule.from_json(schedule.to_json()) == schedule
    assert asdict(schedule.plan.correlation)["cycle"] == 4


def test_statement_says_what_is_counted(sweep_file):
    config = open_sweep(sweep_file, "search={optimizer.lr: {choice: [1, 2]}}").reference_trial
    rounds, rate = counted(config, 4)
    words = statement_of_trial(config, 4.0, 1.0)
    assert f"{rounds} rounds of Poisson sampling at rate {rate:.3g}" in words
    assert f"takes part in {rounds} of them at most" in words


@pytest.mark.parametrize("search", [BANDS, BOTH])
@pytest.mark.parametrize("scope", ["trial", "sweep"])
def test_corners_of_a_space_hold_each_number_of_bands(sweep_file, search, scope):
    settings = [SHARED] if scope == "sweep" else []
    base = [] if search == BANDS else ["base.method={name: dp_sgd}"]
    sweep = open_sweep(sweep_file, search, *base, *settings)
    expected = {1, 4} if search == BOTH else {1, 2, 4}
    assert set(sweep.schedules) == {counted(sweep.written, bands) for bands in expected}
    assert sweep.schedules_vary, "results may choose how a run is counted"
    cap = get_privacy_cap(sweep)
    assert cap is not None
    for trial in sweep.samples(8):
        assert is_within_cap(cap, plan_privacy(trial).run)
    runs = [plan_privacy(trial).run for trial in sweep.samples(4)]
    assert "NOT PRIVATE" not in search_statement(compute_search_privacy(sweep, runs))
    if scope == "sweep":
        assert sweep.search_budget.covers(runs)
        # a run of so many bands that is charged as one of none would break the budget
        long = max(sweep.corners, key=lambda c: c.steps_and_rate[1])
        cheap = plan_privacy(long)
        dear = Run(cheap.run.sampling_rate, 0.8 * cheap.run.noise_multiplier, cheap.run.steps)
        assert not sweep.search_budget.covers([dear])


def test_bands_between_the_corners_stay_within_the_cap(sweep_file):
    sweep = open_sweep(sweep_file, MANY, "base.train.batch_size=64")
    cap = get_privacy_cap(sweep)
    trial = sweep.reference_trial
    for bands in (3, 5, 6, 7, 11, 13):
        method = trial.method.model_copy(update={"bands": bands})
        run = plan_privacy(trial.model_copy(update={"method": method})).run
        assert is_within_cap(cap, run), bands


def test_private_selection_is_proven_over_all_numbers_of_bands(sweep_file):
    sweep = open_sweep(sweep_file, BANDS, *SELECTION)
    cap = get_privacy_cap(sweep)
    assert all(cap.admits(plan_privacy(trial).run) for trial in sweep.corners)
    assert len(sweep.schedules) == 3


def test_auto_is_refused_where_one_epsilon_is_shared_and_counted_elsewhere(sweep_file):
    search = "search={optimizer.lr: {choice: [1, 2]}}"
    with pytest.raises(ConfigError, match=r"method\.bands: auto chooses for the trial's own"):
        load_sweep(sweep_file, [SHARED, "base.method={name: bandmf}", search])
    sweep = load_sweep(sweep_file, ["base.method={name: bandmf}", search])
    bands = sweep.reference_trial.with_own_bands().method.bands
    assert sweep.schedules == (counted(sweep.written, bands),)


def test_charged_run_of_a_trial_without_a_ledger_entry_is_counted_by_rounds(sweep_file):
    sweep = open_sweep(sweep_file, "search={optimizer.lr: {choice: [1, 2]}}")
    config = sweep.reference_trial

    class Seen:
        charged, row = None, {"noise_multiplier": 1.5}

    Seen.config = config
    rounds, rate = counted(config, 4)
    assert get_charged_run(Seen) == Run(rate, 1.5, rounds)
