"""Several budgets in one sweep, two objectives: what a file may say about them."""

from collections import Counter

import pytest

from dpsweep.config.source import dump_sweep
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError

EACH = "privacy.epsilon={each: [1, 2, 8]}"


def test_every_budget_is_a_corner_and_no_other_promise_varies(sweep_file):
    sweep = load_sweep(sweep_file, [EACH])
    assert sweep.epsilons == (1, 2, 8)
    assert {trial.privacy.epsilon for trial in sweep.corners} == {1, 2, 8}
    assert set(Counter(t.privacy.epsilon for t in sweep.samples(60))) == {1, 2, 8}
    assert load_sweep(sweep_file).epsilons == (4,)
    assert load_sweep(sweep_file, ["privacy={noise_multiplier: 1.0}"]).epsilons == (None,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["privacy.epsilon={each: []}"], r"privacy\.epsilon: each takes a list of values"),
        (["privacy.epsilon={each: [1, 1]}"], r"privacy\.epsilon: each lists 1 twice"),
        (["privacy.epsilon={each: [1, -1]}"], r"privacy\.epsilon: must be greater than 0"),
        (["privacy.epsilon={each: [1, a]}"], r"privacy\.epsilon: must be a number, got the text"),
        (["privacy.epsilon={all: [1, 2]}"], r"privacy\.epsilon: must be a number, got \{'all'"),
        (["privacy={epsilon: {each: [1, 2]}, sigma: 1.0}"], r"give exactly one of epsilon and"),
        (
            [EACH, "search.privacy.delta={choice: [1.0e-5, 1.0e-6]}"],
            r"privacy\.delta: cannot be searched",
        ),
        (
            ["search={privacy.epsilon: {uniform: [1, 8]}}"],
            r"cannot be searched.*or give privacy\.epsilon: \{each: \[1, 2, 4\]\} there",
        ),
    ],
)
def test_a_mistake_in_the_budgets_names_the_key(sweep_file, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(sweep_file, settings)


def test_two_objectives_have_two_directions_and_the_first_orders_tables(sweep_file):
    both = load_sweep(sweep_file, ["objective={metrics: [valid/accuracy, seconds]}"])
    assert both.config.objective.goals == ("valid/accuracy", "seconds")
    assert both.config.objective.directions == ("maximize", "minimize")
    assert both.config.objective.metric == "valid/accuracy"
    loss = load_sweep(sweep_file, ["objective={metrics: [valid/loss, valid/accuracy]}"])
    assert loss.config.objective.directions == ("minimize", "maximize")
    assert (loss.config.objective.metric, loss.config.objective.direction) == (
        "valid/loss",
        "minimize",
    )
    one = load_sweep(sweep_file).config.objective
    assert (one.goals, one.directions) == (("valid/accuracy",), ("maximize",))


TWO = "objective={metrics: [valid/accuracy, seconds]}"
MISTAKES = [
    ([TWO, "pruner.name=median"], r"pruner\.name: median ends trials that are behind"),
    ([TWO, "sampler.name=cmaes"], r"sampler\.name: cmaes follows one objective, and there are two"),
    ([TWO, "choose=posterior"], r"choose: posterior: with two objectives a front comes out"),
    (
        ["accounting=private_selection", "choose=posterior"],
        r"choose: posterior: accounting: private_selection is proven.*Write choose: observed",
    ),
    (["objective={metrics: [valid/accuracy, epsilon]}"], r"epsilon is 4 for all trials"),
    (
        ["objective={metrics: [valid/accuracy, valid/accuracy]}"],
        r"metrics: names valid/accuracy twice",
    ),
    (
        ["objective={metric: valid/loss, metrics: [valid/accuracy, seconds]}"],
        r"metric: is given beside metrics",
    ),
    (["objective={metrics: [seconds, epsilon]}"], r"objective.*must be .*'valid/accuracy'"),
    (["objective={metrics: [valid/accuracy]}"], r"objective\.metrics"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES)
def test_a_mistake_in_the_objectives_names_the_key(sweep_file, settings, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(sweep_file, settings)


def test_epsilon_may_be_traded_where_it_differs(sweep_file):
    goal = "objective={metrics: [valid/accuracy, epsilon]}"
    load_sweep(sweep_file, [goal, EACH])
    load_sweep(sweep_file, [goal, "privacy={noise_multiplier: 1.0}"])


def test_bad_trials_end_early_by_default_where_time_binds_and_nowhere_else(sweep_file):
    def pruner(*settings):
        return load_sweep(sweep_file, list(settings)).config.pruner

    hours = "budget={trials: 50, hours: 2}"
    assert pruner().name == "none"
    found = pruner(hours)
    assert (found.name, found.warmup_epochs, found.reduction) == ("successive_halving", 1, 4)
    assert pruner(hours, "pruner={name: none}").name == "none"
    assert pruner(hours, "pruner={name: median}").name == "median"
    assert pruner(hours, TWO).name == "none"
    assert pruner("budget={trials: 50, hours: null}").name == "none"
    with pytest.raises(ConfigError, match=r"budget\.hours: .*a clock would change"):
        load_sweep(sweep_file, [hours, "accounting=private_selection"])


def test_the_pruner_of_a_stored_sweep_is_the_one_that_it_was_launched_with(sweep_file, tmp_path):
    sweep = load_sweep(sweep_file, ["budget={trials: 50, hours: 2}"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_sweep(sweep.file, sweep.base.tree))
    assert load_sweep(again).config.pruner == sweep.config.pruner
