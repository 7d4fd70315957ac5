"""The first trials of a search that learns cover every key evenly, whatever goes in turn."""

from collections import Counter

import numpy as np
import pytest

from dpsweep.config.space.domains import Range, Slot
from dpsweep.config.sweep import load_sweep
from dpsweep.search.quasi_random import QuasiRandomDraw, compute_scrambled_point

SLOT = Slot("train.epochs", "train.epochs")


def drawn(domain, count, seed=0):
    return [QuasiRandomDraw(seed, i, (0, i)).number(SLOT, domain) for i in range(count)]


def eighths(values, low, high):
    counts, _ = np.histogram(values, bins=8, range=(low, high))
    return set(counts)


@pytest.mark.parametrize("seed", range(20))
def test_a_power_of_two_of_points_has_its_share_in_every_part(seed):
    assert eighths([compute_scrambled_point(i, seed) for i in range(8)], 0, 1) == {1}
    assert eighths([compute_scrambled_point(i, seed) for i in range(32)], 0, 1) == {4}


def test_keys_do_not_follow_from_each_other():
    for one, other in ((0, 1), (2, 3), (4, 5), (6, 7)):
        pairs = [
            (compute_scrambled_point(i, one), compute_scrambled_point(i, other)) for i in range(256)
        ]
        counts = Counter((int(2 * x), int(2 * y)) for x, y in pairs)
        assert len(counts) == 4
        assert min(counts.values()) > 40, counts


def test_a_point_is_uniform_over_seeds():
    first = [compute_scrambled_point(0, seed) for seed in range(2000)]
    assert abs(np.mean(first) - 0.5) < 0.03  # four standard deviations
    assert abs(np.var(first) - 1 / 12) < 0.01


@pytest.mark.parametrize("kind", ["uniform", "log_uniform"])
def test_ranges_of_numbers(kind):
    values = drawn(Range(kind, 0.01, 100.0), 64)
    assert min(values) >= 0.01
    assert max(values) <= 100
    if kind == "uniform":
        assert eighths(values, 0.01, 100) == {8}
    else:
        assert eighths(np.log(values), np.log(0.01), np.log(100)) == {8}


def test_ranges_of_whole_numbers_give_each_its_share():
    values = drawn(Range("integer", 1, 4), 64)
    assert Counter(values) == dict.fromkeys([1, 2, 3, 4], 16)
    assert all(isinstance(value, int) for value in values)
    logged = Counter(drawn(Range("log_integer", 1, 3), 6400))
    assert set(logged) == {1, 2, 3}
    whole = np.log(3.5 / 0.5)
    assert logged[1] / 6400 == pytest.approx(np.log(1.5 / 0.5) / whole, abs=0.01)


def test_options_have_their_shares():
    labels = ("a", "b", "c", "d")
    options = Counter(QuasiRandomDraw(0, i, (0, i)).option(SLOT, labels) for i in range(16))
    assert options == dict.fromkeys(range(4), 4)


def test_a_best_value_is_nearer_than_to_random_draws():
    rng = np.random.default_rng(0)
    best = rng.random(400)
    even = np.array([[compute_scrambled_point(i, seed) for i in range(4)] for seed in range(400)])
    nearest = [np.abs(x - best[:, None]).min(1) for x in (even, rng.random((400, 4)))]
    assert np.mean(nearest[0]) < 0.75 * np.mean(nearest[1])
    assert np.quantile(nearest[0], 0.95) < 0.6 * np.quantile(nearest[1], 0.95)


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes"])
def test_four_first_trials_lie_in_four_quarters(sweep_file, search, sampler):
    settings = [f"sampler={{name: {sampler}, startup_trials: 4}}", "budget.trials=9"]
    study = search(load_sweep(sweep_file, settings), 4, lambda record: 0.5)
    kappas = [record.hyperparams["method.kappa"] for record in study.records()]
    counts, _ = np.histogram(kappas, bins=4, range=(0.3, 1.0))
    assert set(counts) == {1}


@pytest.mark.parametrize("seed", [1, 2])
def test_the_first_trials_are_even_over_what_conditions_admit(sweep_file, search, seed):
    file = sweep_file.with_name("seeded.yaml")
    file.write_text(f"{sweep_file.read_text()}\nseed: {seed}\nwhere: method.kappa > 0.9\n")
    settings = ["sampler={name: tpe, startup_trials: 8}", "budget.trials=9"]
    study = search(load_sweep(file, settings), 8, lambda record: 0.5)
    kappas = [record.hyperparams["method.kappa"] for record in study.records()]
    counts, _ = np.histogram(kappas, bins=4, range=(0.9, 1.0))
    assert sum(counts) == 8
    assert min(counts) >= 1


METHODS = """\
search.each_of=[
  {method: {name: dp_sgd}, optimizer: {lr: {log_uniform: [0.1, 10]}}},
  {method: {name: disk, kappa: {uniform: [0.2, 1]}}, optimizer: {lr: {log_uniform: [0.1, 10]}}}]
"""


def test_each_method_in_turn_has_its_own_even_sequence(sweep_file, search):
    text = sweep_file.read_text()
    base = text[: text.index("search:")]
    file = sweep_file.with_name("turns.yaml")
    file.write_text(base + "search:\n  train.batch_size: {choice: [64, 128]}\n")
    settings = [METHODS, "sampler={name: tpe, startup_trials: 8}", "budget.trials=8"]
    study = search(load_sweep(file, settings), 8, lambda record: 0.5)
    rates, sizes = {}, {}
    for record in study.records():
        method = record.hyperparams["method.name"]
        rates.setdefault(method, []).append(np.log10(record.hyperparams["optimizer.lr"]))
        sizes.setdefault(method, []).append(record.hyperparams["train.batch_size"])
    for method in ("dp_sgd", "disk"):
        counts, _ = np.histogram(rates[method], bins=4, range=(-1, 1))
        assert set(counts) == {1}, method
        assert sorted(sizes[method]) == [64, 64, 128, 128]
    assert rates["dp_sgd"] != rates["disk"]


def test_after_the_first_trials_the_sampler_proposes(sweep_file, search):
    settings = ["sampler={name: tpe, startup_trials: 2}", "budget.trials=9"]
    study = search(
        load_sweep(sweep_file, settings), 4, lambda record: record.hyperparams["method.kappa"]
    )
    place = Slot("method.kappa", "method.kappa")
    even = [
        QuasiRandomDraw(0, i, (0, i)).number(place, Range("uniform", 0.3, 1.0)) for i in range(4)
    ]
    kappas = [record.hyperparams["method.kappa"] for record in study.records()]
    assert kappas[:2] == even[:2]
    assert kappas[2] != even[2]
