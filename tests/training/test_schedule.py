"""What a trial is told beforehand is what it would have found out by itself."""

import json
import math
from dataclasses import replace

import pytest
import torch

from dpsweep.config.plan import plan_privacy
from dpsweep.config.trial import TrialConfig
from dpsweep.privacy.accounting import Run
from dpsweep.training import loop
from dpsweep.training.schedule import TrialSchedule, resolve_trial_schedule
from dpsweep.training.trial_dir import TrialDir


@pytest.fixture(autouse=True)
def _fixed_secret(monkeypatch):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "trial_schedule")


def trial(*, train=None, **privacy):
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small", "width": 2},
            "privacy": privacy or {"epsilon": 2.0},
            "train": {"batch_size": 479, "epochs": 4, "device": "cpu", **(train or {})},
            "optimizer": {"lr": 0.1},
            "method": {"name": "fftkf"},
        }
    )


CONFIGS = {
    "epsilon": trial(),
    "small epsilon": trial(epsilon=0.05),
    "given noise": trial(noise_multiplier=0.7),
    "no noise": trial(noise_multiplier=0),
    "part of an epoch": trial(train={"epochs": 2.5, "evaluate_every": 2}),
    "one step": trial(train={"epochs": 0.01}),
    "whole batches": trial(train={"batch_size": 1437}),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@every_config
def test_a_course_comes_back_from_json_as_it_was(config):
    known = resolve_trial_schedule(config)
    assert TrialSchedule.from_json(json.loads(json.dumps(known.to_json()))) == known
    assert TrialSchedule.from_json(known.to_json()) == known


@every_config
def test_no_report_has_spent_more_than_the_promise_and_the_last_one_all_of_it(config):
    known = resolve_trial_schedule(config)
    plan, spent = known.plan, [report.epsilon for report in known.reports]
    assert plan == plan_privacy(config)
    assert spent == sorted(spent)
    assert spent[-1] == plan.epsilon
    if config.privacy.epsilon is not None:
        assert all(0 < epsilon <= config.privacy.epsilon for epsilon in spent)
    for report in known.reports:
        so_far = Run(plan.run.sampling_rate, plan.run.noise_multiplier, report.step)
        exact = so_far.epsilon(plan.delta)
        # The accountant rounds up; two of its grids differ by at most this.
        assert report.epsilon == exact or report.epsilon == pytest.approx(exact, abs=0.02)


@every_config
def test_reports_rise_and_the_last_one_stands_at_the_last_step(config):
    reports = resolve_trial_schedule(config).reports
    steps, epochs = ([getattr(r, k) for r in reports] for k in ("step", "epoch"))
    assert steps == sorted(set(steps))
    assert epochs == sorted(set(epochs))
    assert steps[-1] == resolve_trial_schedule(config).plan.run.steps
    assert epochs[-1] == math.ceil(config.train.epochs)


def test_the_last_report_is_of_no_epoch_twice():
    known = resolve_trial_schedule(trial(train={"epochs": 3, "evaluate_every": 3}))
    assert [(r.epoch, r.step) for r in known.reports] == [(3, 9)]


@pytest.mark.parametrize("name", ["epsilon", "no noise", "part of an epoch"])
def test_a_trial_that_is_told_its_course_does_what_it_does_by_itself(name, tmp_path):
    config, results = CONFIGS[name], []
    for told in (
        None,
        TrialSchedule.from_json(json.loads(json.dumps(resolve_trial_schedule(config).to_json()))),
    ):
        trial_dir = TrialDir(tmp_path / str(told is None))
        trial_dir.make_secret()
        found = loop.train(config, trial_dir, lambda row: None, schedule=told)
        rows = [{k: x for k, x in row.items() if k != "seconds"} for row in found.rows]
        weights = torch.load(trial_dir.weights, weights_only=True)
        results.append((rows, found.plan, weights))
    (rows, plan, weights), (told_rows, told_plan, told_weights) = results
    assert told_rows == rows
    assert told_plan == plan
    assert all(torch.equal(weights[k], told_weights[k]) for k in weights)


def test_a_trial_that_is_told_its_course_asks_no_accountant(tmp_path, monkeypatch):
    config = trial()
    known = resolve_trial_schedule(config)

    def asked(*_):
        raise AssertionError("a worker would have to import the accountant")

    monkeypatch.setattr(loop, "resolve_trial_schedule", asked)
    trial_dir = TrialDir(tmp_path)
    trial_dir.make_secret()
    result = loop.train(config, trial_dir, lambda row: None, schedule=known)
    assert [r["privacy/epsilon_spent"] for r in result.rows] == [r.epsilon for r in known.reports]


def test_the_noise_of_a_told_course_is_the_noise_that_is_used(tmp_path):
    """Else a worker could train with less noise than the driver charges."""
    config, outcomes = trial(), []
    known = resolve_trial_schedule(config)
    louder = replace(known.plan, run=replace(known.plan.run, noise_multiplier=50.0))
    for number, told in enumerate([known, replace(known, plan=louder)]):
        trial_dir = TrialDir(tmp_path / str(number))
        trial_dir.make_secret()
        outcomes.append(loop.train(config, trial_dir, lambda row: None, schedule=told))
        assert outcomes[-1].rows[-1]["noise_multiplier"] == told.plan.run.noise_multiplier
    assert outcomes[0].rows[-1]["valid/loss"] != outcomes[1].rows[-1]["valid/loss"]
