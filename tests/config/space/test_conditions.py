"""Conditions and derived values: what they let through, what they compute, what they refuse."""

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError

BATCHES = "search.train.batch_size={choice: [64, 128, 256]}"
ROOT = "search.optimizer.lr={derive: '0.01 * sqrt(train.batch_size)'}"


def load(sweep_file, *settings):
    return load_sweep(sweep_file, list(settings))


def test_random_points_meet_every_condition(sweep_file):
    sweep = load(
        sweep_file,
        BATCHES,
        "where=['train.epochs * data.size / train.B <= 30', "
        "'method.kappa < 0.5 or optimizer.lr < 1']",
    )
    trials = sweep.samples(60)
    assert len(trials) == 60
    assert {t.train.batch_size for t in trials} == {128, 256}  # 2 * 1437 / 64 = 44.9 steps
    assert all(t.method.kappa < 0.5 or t.optimizer.lr < 1 for t in trials)
    assert 0.2 < sweep.share() < 0.6  # 2/3 of the batches, and about 0.29 + 0.71 * 0.52 of the rest


def test_without_a_condition_all_points_pass(sweep_file):
    assert load(sweep_file).share() == 1


def test_a_condition_is_about_the_trials_that_have_its_keys(sweep_file):
    sweep = load(
        sweep_file,
        "search={method: {one_of: [{name: dp_sgd}, {name: disk, kappa: {uniform: [0.1, 1]}}]}}",
        "where=method.kappa > 0.9",
    )
    found = sweep.samples(80)
    assert {t.method.name for t in found} == {"dp_sgd", "disk"}
    assert all(t.method.kappa > 0.9 for t in found if t.method.name == "disk")


def test_conditions_may_name_what_is_not_searched(sweep_file):
    assert load(sweep_file, "where=optimizer.momentum > 0 or method.name == 'fftkf'").share() == 1


def test_pieces_that_break_a_condition_need_not_fit(sweep_file):
    sweep = load(sweep_file, BATCHES, "where=train.batch_size < 256")

    def fits(trial):
        if trial.train.batch_size == 256:
            raise ConfigError("does not fit")

    sweep.check_trials(fits)
    assert len(sweep.corners) == 5
    with pytest.raises(ConfigError, match="does not fit"):
        load(sweep_file, BATCHES).check_trials(fits)


def test_a_derived_value_follows_from_the_drawn_ones_and_is_shown_among_them(sweep_file):
    sweep = load(sweep_file, BATCHES, ROOT)
    rates = {t.train.batch_size: t.optimizer.lr for t in sweep.samples(40)}
    assert rates == {64: 0.08, 128: 0.01 * 128**0.5, 256: 0.16}
    _, hyperparams = sweep.space.draw(sweep.base.tree, _Low())
    assert list(hyperparams) == ["method.kappa", "train.batch_size", "optimizer.lr"]


class _Low:
    def number(self, slot, domain):
        return domain.low

    def option(self, slot, labels):
        return 0

    choose_label = option


def test_derived_values_are_computed_in_the_order_they_need(sweep_file):
    sweep = load(
        sweep_file,
        "search.method.kappa={derive: 'method.cut / 2 + optimizer.lr'}",
        "search.method.cut={derive: 'optimizer.lr * 3'}",
        "search.optimizer.lr={uniform: [0.1, 0.2]}",
        "where=optimizer.lr > 0.15",
    )
    for trial in sweep.samples(5):
        lr = trial.optimizer.lr
        assert (trial.method.cut, trial.method.kappa) == pytest.approx((3 * lr, 2.5 * lr))
        assert lr > 0.15


def test_a_branch_may_derive_its_own_keys(sweep_file):
    sweep = load(
        sweep_file,
        "search={optimizer.lr: {uniform: [0.2, 0.4]}, method: {one_of: [{name: dp_sgd}, "
        "{name: disk, kappa: {derive: 1 - optimizer.lr}}]}}",
    )
    disks = [t for t in sweep.samples(20) if t.method.name == "disk"]
    assert disks
    assert all(t.method.kappa == 1 - t.optimizer.lr for t in disks)


MISTAKES = [
    ("where=train.epochss > 1", r"--set where: unknown key 'train\.epochss'.*'train\.epochs'"),
    ("where=method.kappa > ", r"--set where: 'method\.kappa >' is no formula: "),
    ("where=method.kappa > 2", r"where: none of 1000 random points of the space \(0\.0 %\) meets"),
    ("where=method.kappa * 2", r"'method\.kappa \* 2' is \d\.\d+, not true or false"),
    ("where=log(method.kappa - 1) < 1", r"has no value at -0\.\d+.*\(at method\.kappa = 0\."),
    ("where=privacy.noise_multiplier > 1", r"unknown key 'privacy\.noise_multiplier', or one that"),
    ("where=method.__class__ == 1", r"unknown key 'method\.__class__'"),
    ("where=[method.kappa > 0.5, method.kapa > 0]", r"unknown key 'method\.kapa'.*'method\.kappa'"),
    ("where=3", r"where: must be text"),
    (
        "search.optimizer.lr={derive: 'optimizer.momentumm * 2'}",
        r"optimizer\.lr: derive: 'optimizer\.momentumm \* 2': unknown key 'optimizer\.momentumm'",
    ),
    (
        "search.optimizer.lr={derive: 'optimizer.beta1'}",
        r"neither searched nor written in the base config",
    ),
    (
        "search.optimizer.lr={derive: '2 * optimizer.lr'}",
        r"derive: optimizer\.lr needs optimizer\.lr, and so on in a circle",
    ),
    ("search.optimizer.lr={derive: 3}", r"derive takes a formula in quotes.*got 3"),
    ("search.optimizer.lr={derive: 'open(1)'}", r"search\.optimizer\.lr: unknown function 'open'"),
    ("search.optimizer.lr={derive: '0 - 1'}", r"search\.optimizer\.lr: must be greater than 0"),
    ("search.optimizer.lr={derive: '1 / 0'}", r"optimizer\.lr: derive: '1 / 0': has no value at 1"),
    (
        "search.train.batch_size={derive: 'data.size / 10'}",
        r"search\.train\.batch_size: must be a whole number, got 143\.7",
    ),
    ("search.seed={derive: '1'}", r"seed: cannot be searched"),
]


@pytest.mark.parametrize(("setting", "message"), MISTAKES)
def test_a_mistake_names_the_place_the_key_and_a_guess(sweep_file, setting, message):
    with pytest.raises(ConfigError, match=message):
        load(sweep_file, setting)


def test_two_derived_values_that_need_each_other_are_refused(sweep_file):
    with pytest.raises(ConfigError, match=r"in a circle"):
        load(
            sweep_file,
            "search.method.kappa={derive: 'method.cut'}",
            "search.method.cut={derive: 'method.kappa'}",
        )


def test_a_condition_in_the_file_names_its_line(sweep_file):
    sweep_file.write_text(sweep_file.read_text() + "where:\n  - method.kappa > 0\n  - kapa > 0\n")
    line = len(sweep_file.read_text().splitlines())
    with pytest.raises(ConfigError, match=rf"tiny\.yaml:{line}: where\.1: unknown key 'kapa'"):
        load(sweep_file)
