"""A Gaussian process tells worth from noise, sees the total step, and is the same each time."""

import math

import numpy as np
import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.search.ranking import LEAST_TRIALS, expected_values, surrogates
from dpsweep.search.surrogate import TOTAL_STEP, Surrogate, searched_features
from dpsweep.search.trial_record import Record

TREE = {
    "data": {"name": "digits"},
    "model": {"name": "linear"},
    "privacy": {"epsilon": 4},
    "train": {"batch_size": 128, "epochs": 30},
    "optimizer": {"lr": 1.0},
    "method": {"name": "dp_sgd"},
}
BASE = TrialConfig.model_validate(TREE)
PLAIN = """search={optimizer.lr: {log_uniform: [0.01, 30]},
    train.batch_size: {choice: [64, 128, 256]},
    privacy.clip_norm: {log_uniform: [0.1, 1]}}"""
METHODS = """search={method: {each_of: [{name: dp_sgd}, {name: disk, kappa: {uniform: [0.3, 1]}}]},
    optimizer.lr: {log_uniform: [0.01, 30]}}"""


def config_of(hyperparams):
    parts = {"privacy": {}, "train": {}, "optimizer": {}, "method": {}}
    for key, value in hyperparams.items():
        section, name = key.split(".")
        parts[section][name] = value
    tree = {**TREE, **{k: {**TREE[k], **v} for k, v in parts.items()}}
    return TrialConfig.model_validate(tree)


def record(number, hyperparams, value, **more):
    known = {"state": "complete", "row": None, "reason": None, "void": False, "dispatched": True}
    return Record(
        number, hyperparams=hyperparams, value=value, config=config_of(hyperparams), **known | more
    )


def drawn(rng):
    """One point of PLAIN, with the total step within a factor of 8 of 640."""
    clip, batch = float(10 ** rng.uniform(-1, 0)), int(rng.choice([64, 128, 256]))
    r = 640 * 2 ** rng.uniform(-3, 3)
    steps = config_of({"train.batch_size": batch}).steps_and_rate[0]
    lr = r / (clip * steps)
    return {"optimizer.lr": lr, "train.batch_size": batch, "privacy.clip_norm": clip}


def worth(config):
    """Best at a total step of 640, whatever else."""
    return 0.94 - 0.004 * math.log2(config.total_step / 640) ** 2


def searched(seed, count, noise=0.01, sign=1):
    rng = np.random.default_rng(seed)
    points = [drawn(rng) for _ in range(count)]
    return [
        record(i, p, sign * (worth(config_of(p)) + noise * rng.standard_normal()))
        for i, p in enumerate(points)
    ]


@pytest.fixture
def sweep(sweep_file):
    return lambda *settings: load_sweep(sweep_file, ["method.name=dp_sgd", *settings])


def test_the_total_step_has_the_clip_norm_in_it_where_releases_have():
    steps = BASE.steps_and_rate[0]
    assert steps == round(30 * 1437 / 128)
    sgd = config_of({"optimizer.lr": 2.0, "privacy.clip_norm": 0.5})
    adam = config_of({"method.name": "dp_adam", "optimizer.lr": 0.01, "privacy.clip_norm": 0.5})
    assert sgd.total_step == pytest.approx(2 * 0.5 * steps)
    assert adam.total_step == pytest.approx(0.01 * steps)


@pytest.mark.parametrize("sign", [-1, 1], ids=["accuracy", "loss"])
def test_its_choice_is_worth_more_than_the_best_observed_trial(sweep, sign):
    """Regret over twenty searches of 32 trials: 0.0014 by posterior, 0.0025 as observed."""
    by_result, by_mean = [], []
    space = sweep(PLAIN).space
    for seed in range(20):
        records = searched(seed, 32, sign=-sign)
        means = Surrogate(space, records, sign).means()
        highest = min(records, key=lambda r: sign * r.value)
        chosen = min(records, key=lambda r: sign * means[r.number])
        by_result.append(worth(highest.config))
        by_mean.append(worth(chosen.config))
    assert 0.94 - np.mean(by_mean) < 0.75 * (0.94 - np.mean(by_result))


def test_it_is_the_same_each_time_and_in_any_order(sweep):
    space, records = sweep(PLAIN).space, searched(3, 16)
    first = Surrogate(space, records, -1).means()
    assert first == Surrogate(space, records[::-1], -1).means()
    assert list(first) == sorted(first)


def test_noise_and_the_leading_key_are_found(sweep):
    space = sweep(PLAIN).space
    found = [Surrogate(space, searched(seed, 64), -1) for seed in range(8)]
    assert np.mean([one.noise for one in found]) == pytest.approx(0.01, rel=0.3)
    assert sum(one.features[0].key == TOTAL_STEP for one in found) >= 7


def test_the_curve_passes_near_the_truth_and_through_what_it_predicts(sweep):
    records = searched(1, 64)
    one = Surrogate(sweep(PLAIN).space, records, -1)
    best = max(records, key=lambda r: one.means()[r.number])
    steps, mean, spread = one.along(one.features[0], best)
    assert steps[0] == pytest.approx(min(r.config.total_step for r in records))
    assert steps[-1] == pytest.approx(max(r.config.total_step for r in records))
    at_best = np.interp(math.log(best.config.total_step), np.log(steps), mean)
    assert at_best == pytest.approx(one.means()[best.number], abs=1e-4)
    truth = 0.94 - 0.004 * np.log2(steps / 640) ** 2
    assert np.mean(np.abs(mean - truth) < 2 * spread) > 0.8
    assert 320 < steps[mean.argmax()] < 1280


def test_one_diverged_trial_does_not_hide_the_rest(sweep):
    records = searched(5, 24)
    space = sweep(PLAIN).space
    before = Surrogate(space, records, -1).means()
    spoilt = [*records, record(99, drawn(np.random.default_rng(99)), 0.1)]
    after = Surrogate(space, spoilt, -1).means()
    assert worth(spoilt[max(records, key=lambda r: after[r.number]).number].config) > 0.93
    assert max(before.values()) == pytest.approx(max(after.values()), abs=0.01)


def test_methods_share_a_process_and_a_key_of_one_is_no_key_of_the_other(sweep):
    rng, records = np.random.default_rng(0), []
    for i in range(16):
        lr = float(10 ** rng.uniform(-1, 1))
        own = {"method.name": "disk", "method.kappa": float(rng.uniform(0.3, 1))} if i % 2 else {}
        hyperparams = {"method.name": "dp_sgd", **own, "optimizer.lr": lr}
        value = 0.9 + 0.02 * (i % 2) - 0.01 * math.log10(lr) ** 2 + 0.003 * rng.standard_normal()
        records.append(record(i, hyperparams, value))
    features = {f.key: f for f in searched_features(sweep(METHODS).space, records)}
    assert features.keys() == {TOTAL_STEP, "method.name", "method.kappa"}
    assert features["method.kappa"].scaled([None, 1.0])[0] == 0.5
    assert features["method.name"].words == ('"dp_sgd"', '"disk"')
    means = Surrogate(sweep(METHODS).space, records, -1).means()
    assert means[max(means, key=means.get)] == pytest.approx(0.92, abs=0.005)
    assert max(means, key=means.get) % 2 == 1


def test_what_follows_from_other_keys_and_what_never_varied_is_no_feature(sweep):
    space = sweep(
        """search={optimizer.lr: {derive: "0.01 * train.batch_size"},
        train.batch_size: {choice: [64, 128]}, privacy.clip_norm: {choice: [0.5]}}"""
    ).space
    records = [
        record(i, {"optimizer.lr": 0.01 * b, "train.batch_size": b, "privacy.clip_norm": 0.5}, 0.9)
        for i, b in enumerate([64, 128])
    ]
    assert [f.key for f in searched_features(space, records)] == ["train.batch_size"]


def test_each_epsilon_with_enough_trials_has_a_process_of_its_own(sweep):
    made = sweep(PLAIN, "privacy.epsilon={each: [1, 4]}")
    many = searched(0, LEAST_TRIALS)
    other = BASE.privacy.model_copy(update={"epsilon": 1.0})
    few = [record(50 + r.number, r.hyperparams, r.value) for r in searched(1, LEAST_TRIALS - 1)]
    few = [
        Record(**{**vars(r), "config": r.config.model_copy(update={"privacy": other})}) for r in few
    ]
    failed = [record(80, many[0].hyperparams, 0.9, state="failed")]
    repeats = [record(81, many[0].hyperparams, 0.9, confirms=0)]
    records = [*many, *few, *failed, *repeats]
    assert surrogates(made, records, LEAST_TRIALS).keys() == {4}
    assert expected_values(made, records).keys() == {r.number for r in many}
    assert surrogates(made, records, 8).keys() == {1, 4}


@pytest.mark.parametrize(
    "settings",
    [
        ["choose=observed"],
        ["objective={metrics: [valid/accuracy, seconds]}"],
        ["accounting=private_selection"],
    ],
)
def test_where_the_choice_is_as_observed_nothing_is_expected(sweep, settings):
    assert expected_values(sweep(PLAIN, *settings), searched(0, 20)) == {}


def test_a_search_in_which_nothing_varied_has_no_process(sweep):
    made = sweep("search={privacy.clip_norm: {choice: [0.5]}}")
    records = [record(i, {"privacy.clip_norm": 0.5}, 0.9) for i in range(20)]
    assert expected_values(made, records) == {}


def test_selection_bias_is_what_the_best_of_many_shows_above_its_worth(sweep):
    """Of 32 trials: 0.018 measured on 20 searches, 0.014 estimated."""
    space, measured, estimated = sweep(PLAIN).space, [], []
    for seed in range(20):
        records = searched(seed, 32)
        highest = max(records, key=lambda r: r.value)
        measured.append(highest.value - worth(highest.config))
        estimated.append(
            Surrogate(space, records, -1).estimate_selection_bias(by_posterior=False).overstatement
        )
    assert np.mean(estimated) == pytest.approx(np.mean(measured), rel=0.35)


def test_leads_between_searches_of_one_space_stay_within_what_chance_can_make(sweep):
    """190 pairs of 20 searches; 0.95 is aimed at, 0.93 was measured."""
    space, chosen, spreads = sweep(PLAIN).space, [], []
    for seed in range(20):
        records = searched(seed, 16)
        one = Surrogate(space, records, -1)
        means = one.means()
        chosen.append(worth(max(records, key=lambda r: means[r.number]).config))
        spreads.append(one.estimate_selection_bias(by_posterior=True).spread)
    apart = np.abs(np.subtract.outer(chosen, chosen))
    limit = 1.96 * np.sqrt(np.add.outer(np.square(spreads), np.square(spreads)))
    within = (apart <= limit)[np.triu_indices(20, 1)].mean()
    assert within > 0.85
    assert np.mean(spreads) < 0.02
