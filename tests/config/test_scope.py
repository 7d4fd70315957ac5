"""Shared budgets give trials noise of their own, and files that contradict themselves are told."""

import pytest

from dpsweep.config.plan import plan_privacy
from dpsweep.config.source import parse_yaml
from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import dump_trial, load_trial
from dpsweep.core.errors import ConfigError
from dpsweep.training.check import check_trial

SHARED, SELECTED = "privacy.scope=sweep", "accounting=private_selection"


@pytest.mark.parametrize(
    ("search", "schedules", "varies"),
    [
        ("{optimizer.lr: {uniform: [1, 2]}}", {(22, 128)}, False),
        ("{train.batch_size: {choice: [64, 500, 128]}}", {(45, 64), (6, 500)}, True),
        (
            "{train.B: {integer: [64, 128]}, train.E: {uniform: [1, 4]}}",
            {(22, 64), (90, 64), (11, 128), (45, 128)},
            True,
        ),
        (
            "{one_of: [{method: {name: dp_sgd}, train: {epochs: 1}}, "
            "{method: {name: disk}, train: {epochs: {uniform: [3, 4]}}}]}",
            {(11, 128), (45, 128)},
            True,
        ),
        ('{train.batch_size: {derive: "64 * train.epochs"}}', {(22, 128)}, True),
    ],
)
def test_schedules_are_those_at_the_ends_of_batch_size_and_epochs(
    sweep_file, search, schedules, varies
):
    sweep = load_sweep(sweep_file, [f"search={search}"])
    assert {(steps, round(rate * 1437)) for steps, rate in sweep.schedules} == schedules
    assert sweep.schedules_vary == varies


@pytest.mark.parametrize(
    "search", ["{optimizer.lr: {uniform: [1, 2]}}", "{train.E: {choice: [1, 2]}}"]
)
def test_trial_of_a_shared_budget_has_its_own_noise_and_trains_alone(sweep_file, search):
    sweep = load_sweep(sweep_file, [SHARED, f"search={search}", "budget.trials=9"])
    assert sweep.written.privacy.epsilon == 4
    for config in sweep.corners:
        privacy = config.privacy
        assert (privacy.scope, privacy.epsilon) == ("trial", None)
        assert plan_privacy(config).run.noise_multiplier == privacy.noise_multiplier
        assert plan_privacy(config).epsilon < 4 / 2
        assert load_trial(parse_yaml(dump_trial(config), "x")) == config
    fewer = load_sweep(sweep_file, [SHARED, f"search={search}", "budget.trials=8"])
    assert (
        fewer.reference_trial.privacy.noise_multiplier
        < sweep.reference_trial.privacy.noise_multiplier
    )


def test_repeats_are_runs_of_each_epsilon(sweep_file):
    settings = ["budget.trials=8", "confirm={top: 2, seeds: 5}"]
    assert load_sweep(sweep_file, settings).num_runs == 18
    each = ["privacy.epsilon={each: [1, 2]}"]
    assert load_sweep(sweep_file, settings + each).num_runs == 28


def test_one_trial_alone_shares_no_budget(sweep_file):
    text = dump_trial(load_sweep(sweep_file).reference_trial).replace(
        "scope: trial", "scope: sweep"
    )
    source = parse_yaml(text, "one.yaml")
    with pytest.raises(ConfigError, match=r"one\.yaml:\d+: privacy\.scope: .* Write scope: trial"):
        check_trial(load_trial(source), source)


MISTAKES = [
    (
        [SHARED, "accounting=none"],
        r"accounting: none charges the chosen trial alone, but privacy\.scope: sweep makes epsilon "
        r"4 the budget of all trials together\. Write accounting: composition, or privacy\.sc",
    ),
    (
        ["privacy={noise_multiplier: 1.5, scope: sweep}"],
        r"privacy\.scope: sweep shares one epsilon.*noise_multiplier: 1\.5 gives.*Write epsilon: 4",
    ),
    (["privacy={scope: sweep}"], r"privacy\.epsilon: give exactly one of epsilon and noise"),
    (
        [SHARED, "privacy.epsilon={each: [1, 2]}"],
        r"privacy\.epsilon: each gives every trial one of several budgets.*such as epsilon: 1",
    ),
    (
        ["search={privacy.scope: {choice: [trial, sweep]}}"],
        r"cannot be searched: privacy\.scope is",
    ),
    ([SELECTED, "sampler.name=tpe"], r"sampler\.name: the text 'tpe' goes against.*name: random"),
    (
        [SELECTED, "pruner.name=median"],
        r"pruner\.name: .*must stay unseen\. Write pruner: \{name: none\}",
    ),
    ([SELECTED, "confirm={top: 3}"], r"confirm: .*no best trials to repeat\. Delete confirm"),
    (
        [SELECTED, "budget.hours=3"],
        r"budget\.hours: 3.* a clock would change\. Delete budget\.hours",
    ),
    (
        [SELECTED, "objective={metrics: [valid/accuracy, seconds]}"],
        r"objective\.metrics: .*a front has many\. Write objective: \{metric: valid/accuracy\}",
    ),
    ([SELECTED, "privacy.epsilon={each: [1, 2]}"], r"privacy\.epsilon: .*do not follow one law"),
    (
        [SELECTED, "search={each_of: [disk, dp_sgd]}"],
        r"search\.each_of: .*in turn.*Write one_of, or",
    ),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES, ids=lambda x: str(x)[:40])
def test_contradictions_are_named_with_a_remedy(sweep_file, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(sweep_file, settings)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("budget.trial_timeout=1h", r"budget\.trial_timeout: .*goes against accounting"),
        ("resources.memory=2GB", r"resources\.memory: .*goes against accounting"),
        ("start=[{optimizer.lr: 1.5}]", r"start: .* goes against accounting"),
        ("learn_from=other", r"learn_from: .*goes against accounting"),
    ],
)
def test_private_selection_refuses_what_lets_a_clock_or_a_choice_decide(
    sweep_file, setting, message
):
    selected = [SELECTED, "sampler={name: random}", "pruner={name: none}"]
    load_sweep(sweep_file, selected)
    with pytest.raises(ConfigError, match=message):
        load_sweep(sweep_file, [*selected, setting])
