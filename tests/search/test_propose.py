"""Proposals keep to the conditions, follow from seed and history alone, and are stored whole."""

import time
from dataclasses import replace
from datetime import datetime

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from dpsweep.config.space.expression import parse_formula
from dpsweep.config.space.suggest import RoundRobin
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.search.propose import propose
from dpsweep.store.study import Study

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gp", "cmaes")]
every_sampler = pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", *SLOW])


def load(sweep_file, sampler, *settings, startup=3):
    own = f"sampler={{name: {sampler}, startup_trials: {startup}}}"
    return load_sweep(sweep_file, [own, "budget.trials=50", *settings])


def near(record):
    """Best at kappa 0.6 and lr 1."""
    kappa, lr = record.hyperparams["method.kappa"], record.hyperparams["optimizer.lr"]
    return float(1 - (kappa - 0.6) ** 2 - 0.1 * np.log(lr) ** 2)


def hyperparams(study):
    return [record.hyperparams for record in study.records()]


@every_sampler
def test_a_search_that_is_reopened_for_each_trial_is_the_straight_one(sweep_file, search, sampler):
    sweep = load(sweep_file, sampler, "where=method.kappa > 0.5")
    straight = search(sweep, 6, near, name="a")
    reopened = search(sweep, 6, near, name="b", reopen=True)
    assert hyperparams(straight) == hyperparams(reopened)
    assert len({tuple(k.values()) for k in hyperparams(straight)}) == 6
    assert all(k["method.kappa"] > 0.5 for k in hyperparams(straight))


@every_sampler
def test_another_seed_proposes_otherwise(sweep_file, search, sampler):
    one = search(load(sweep_file, sampler), 2, near, name="a")
    file = sweep_file.with_name("other.yaml")
    file.write_text(sweep_file.read_text() + "seed: 1\n")
    other = search(load(file, sampler), 2, near, name="b")
    assert hyperparams(one)[0] != hyperparams(other)[0]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes"])
def test_a_sampler_that_learns_gets_nearer_than_a_random_one(sweep_file, search, sampler):
    settings = [
        "search.method.kappa={uniform: [0.01, 1.0]}",
        "search.optimizer.lr={log_uniform: [0.01, 100]}",
    ]
    learnt = search(load(sweep_file, sampler, *settings, startup=5), 30, near, name="a")
    blind = search(load(sweep_file, "random", *settings), 30, near, name="b")
    late = [np.mean([r.value for r in study.records()[15:]]) for study in (learnt, blind)]
    assert late[0] > late[1] + 0.2  # random: mean 0.1 * ln(100)^2 / 3 = 0.7 below the best


def test_no_condition_costs_a_point_of_the_even_sequence(sweep_file, search):
    free = [
        k["method.kappa"] for k in hyperparams(search(load(sweep_file, "qmc"), 16, near, name="a"))
    ]
    kept = search(load(sweep_file, "qmc", "where=method.kappa > 0.5"), 6, near, name="b")
    assert [k["method.kappa"] for k in hyperparams(kept)] == [x for x in free if x > 0.5][:6]
    counts, _ = np.histogram(free, bins=4, range=(0.3, 1.0))
    assert set(counts) == {4}  # Sobol: each quarter has its share of every power of two


def test_a_driver_that_dies_while_asking_leaves_nothing_and_the_next_asks_the_same(
    sweep_file, search, monkeypatch, tmp_path
):
    sweep = load(sweep_file, "tpe")
    whole = search(sweep, 6, near, name="a")
    cut = search(sweep, 5, near, name="b")

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cut._storage, "create_new_trial", killed)
    with pytest.raises(KeyboardInterrupt):
        cut.ask()
    again = Study.open(f"sqlite:///{tmp_path}/b.db", sweep)
    assert again.running() == []
    assert again.ask().hyperparams == whole.records()[5].hyperparams


def test_a_trial_is_in_the_storage_with_all_that_it_needs(sweep_file, uri):
    study = Study.create(uri, load(sweep_file, "tpe"))
    asked = study.ask()
    (stored,) = optuna.load_study(study_name="tiny", storage=uri).get_trials()
    assert stored.state == TrialState.RUNNING
    assert stored.params == asked.hyperparams == stored.user_attrs["hyperparams"]
    assert stored.datetime_start is not None


def test_derived_values_are_no_parameters_of_the_study(sweep_file, uri):
    sweep = load(sweep_file, "tpe", "search.optimizer.lr={derive: '2 * method.kappa'}")
    record = Study.create(uri, sweep).ask()
    (stored,) = optuna.load_study(study_name="tiny", storage=uri).get_trials()
    assert list(stored.params) == ["method.kappa"]
    assert record.hyperparams["optimizer.lr"] == 2 * stored.params["method.kappa"]
    assert record.config.optimizer.lr == record.hyperparams["optimizer.lr"]


def test_running_trials_push_a_liar_away_and_leave_others_alone(sweep_file, search):
    study = search(load(sweep_file, "tpe"), 6, near)

    def next_one(liar):
        sweep = load(sweep_file, "tpe", f"sampler.constant_liar={liar}")
        return propose(sweep, study._study).params

    alone = next_one("true")
    assert alone == next_one("false")  # nothing runs
    study.ask()
    assert next_one("true") != next_one("false")


def test_keys_are_drawn_together_or_apart(sweep_file, search):
    study = search(load(sweep_file, "tpe"), 6, near)
    joint, apart = (
        propose(load(sweep_file, "tpe", f"sampler.multivariate={flag}"), study._study).params
        for flag in ("true", "false")
    )
    assert joint != apart


def test_a_condition_that_no_proposal_meets_fails_the_trial_with_the_share(sweep_file, uri):
    study = Study.create(uri, load(sweep_file, "random"))
    study.ask()
    study.sweep = replace(study.sweep, conditions=(Never(),))
    with pytest.raises(ConfigError, match=r"trial 1 .* none of 1000 and more proposals.* 0\.0% do"):
        study.ask()
    assert study.num_asked() == 2
    assert study.running() == [0]


class Never:
    """A condition that passed the check of the file, and that no proposal meets."""

    place = "x.yaml:1: where"
    formula = parse_formula("1 > 2")

    def holds(self, trial):
        return False


def test_where_a_sampler_insists_a_random_point_is_taken(sweep_file, search, monkeypatch):
    monkeypatch.setattr("dpsweep.search.propose._MOST_ATTEMPTS", 1)
    sweep = load(sweep_file, "tpe", "where=method.kappa > 0.95", startup=2)
    assert all(k["method.kappa"] > 0.95 for k in hyperparams(search(sweep, 4, near)))


@pytest.mark.parametrize(
    ("sampler", "space", "message"),
    [
        ("cmaes", "search.train.batch_size={choice: [64, 128]}", r"train\.batch_size is a choice"),
        (
            "cmaes",
            "search={method: {one_of: [{name: disk}]}}",
            "cmaes covers a space of fixed keys",
        ),
        ("gp", "search={each_of: [disk, fftkf]}", "gp covers a space of fixed keys"),
        ("qmc", "search={each_of: [disk, fftkf]}", "qmc covers a space of fixed keys"),
    ],
)
def test_a_sampler_that_cannot_cover_the_space_is_refused(sweep_file, sampler, space, message):
    with pytest.raises(ConfigError, match=rf"--set sampler.*: {message}|sampler.*: .*{message}"):
        load(sweep_file, sampler, space)


def test_turns_go_through_all_combinations():
    seen = {(t.take(2), t.take(3)) for t in map(RoundRobin, range(6))}
    assert seen == {(i, j) for i in range(2) for j in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
def test_asking_takes_a_tenth_of_a_second_after_a_thousand_trials(sweep_file, uri, sampler):
    sweep = load(sweep_file, sampler, "where=method.kappa > 0.5", "budget.trials=2000")
    study, rng = Study.create(uri, sweep), np.random.default_rng(0)
    done = propose(load(sweep_file, "random"), study._study).trial()
    for _ in range(1000):
        done.params = {"method.kappa": rng.uniform(0.3, 1), "optimizer.lr": rng.uniform(0.3, 3)}
        done.state, done.datetime_complete = TrialState.COMPLETE, datetime.now()
        done.values = [rng.random()]
        study._add(done)
    study.ask()  # reads them all, once
    seconds = []
    for _ in range(9):
        start = time.process_time()  # on a busy machine the wall clock says nothing
        study.ask()
        seconds.append(time.process_time() - start)
    assert np.median(seconds) < 0.1


def test_points_to_start_from_come_first_and_leave_the_rest_to_the_sampler(sweep_file, search):
    start = "start=[{method.kappa: 0.7, optimizer.lr: 1}, {method.kappa: 0.5}]"
    first, second, third = hyperparams(search(load(sweep_file, "tpe", start), 3, near, name="a"))
    assert first == {"method.kappa": 0.7, "optimizer.lr": 1.0}
    assert second["method.kappa"] == 0.5
    free = hyperparams(search(load(sweep_file, "tpe"), 3, near, name="b"))
    assert third["method.kappa"] not in (0.7, 0.5)
    assert second["optimizer.lr"] != 1.0
    assert free[0]["method.kappa"] != 0.7


def test_each_method_and_budget_starts_from_the_points_about_it(sweep_file, search):
    sweep = load(
        sweep_file,
        "random",
        "privacy.epsilon={each: [1, 8]}",
        "search={each_of: [dp_sgd, disk]}",
        "start=[{method.kappa: 0.7}, {privacy.epsilon: 8, optimizer.total_step: 300}, "
        "{method.name: disk, method.gamma: 2}]",
    )
    found = {}
    for k in hyperparams(search(sweep, 12, lambda r: 0.5)):
        found.setdefault((k["method.name"], k["privacy.epsilon"]), []).append(k)
    assert [k["method.kappa"] == 0.7 for k in found["disk", 1]] == [True, False, False]
    assert [k["method.gamma"] == 2 for k in found["disk", 1]][1]
    assert [k["optimizer.total_step"] == 300 for k in found["disk", 8]] == [False, True, False]
    assert [k["optimizer.total_step"] == 300 for k in found["dp_sgd", 8]] == [True, False, False]
    assert all(k["optimizer.total_step"] != 300 for k in found["dp_sgd", 1])


def test_a_start_in_one_branch_of_a_one_of_chooses_the_branch(sweep_file, search):
    sweep = load(
        sweep_file,
        "random",
        "search={method: {one_of: [{name: dp_sgd}, {name: disk, kappa: {uniform: [0.1, 1]}}]}}",
        "start=[{method.name: disk, method.kappa: 0.2}]",
    )
    (first,) = hyperparams(search(sweep, 1, lambda r: 0.5))
    assert first == {"method.name": "disk", "method.kappa": 0.2}
