"""Points to start from lie in the space, and the printed ones are the methods' own defaults."""

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.methods import METHODS, PUBLISHED


def load(sweep_file, *settings):
    return load_sweep(sweep_file, list(settings))


def test_points_are_spelled_out_and_kept_in_order(sweep_file):
    sweep = load(
        sweep_file,
        "search.method.rho={uniform: [0, 0.9]}",
        "start=[{method.rho: 0.5, optimizer.lr: 1}, {method.kappa: 0.7}]",
    )
    assert sweep.start == ({"method.depth": 0.5, "optimizer.lr": 1}, {"method.kappa": 0.7})
    assert load(sweep_file).start == ()


@pytest.mark.parametrize("method", [m for m in PUBLISHED if m != "dp_sgd"])
def test_printed_is_the_default_of_each_searched_tunable(sweep_file, method):
    base = {"spectral_dp": "keep", "block_spectral_dp": "keep"}.get(method)
    sweep = load(sweep_file, f"search={{each_of: [{method}]}}", "start=published")
    searched = [key for key in METHODS[method].space if key.startswith("method.")]
    if not searched:
        assert sweep.start == ()
        return
    (point,) = sweep.start
    assert set(point) == {"method.name", *searched}
    defaults = METHODS[method].config()
    for key in searched:
        value = getattr(defaults, key.removeprefix("method."))
        assert point[key] in (value, {"published": getattr(value, "published", None)})
    assert base is None or point[f"method.{base}"] == 0.5


def test_a_printed_value_outside_the_range_is_left_to_the_sampler(sweep_file):
    sweep = load(
        sweep_file,
        "search={method.kappa: {uniform: [0.8, 1]}, method.cut: {uniform: [0.1, 0.9]}}",
        "start=published",
    )
    assert sweep.start == ({"method.cut": 0.5},)


def test_a_printed_point_that_breaks_a_condition_is_left_out(sweep_file):
    assert load(sweep_file, "start=published").start == ({"method.kappa": 0.7},)
    assert load(sweep_file, "start=published", "where=method.kappa < 0.6").start == ()


def test_a_point_may_name_what_one_branch_alone_has(sweep_file):
    each = "search={each_of: [dp_sgd, disk]}"
    assert load(sweep_file, each, "start=[{method.kappa: 0.7}]").start


MISTAKES = [
    ("[{method.kappa: 0.1}]", r"start\.0: method\.kappa = 0\.1 is outside the searched \[0\.3, 1"),
    ("[{method.kappa: 0.5}, {method.cut: 0.5}]", r"start\.1: method\.cut is not searched here\."),
    ("[{method.kapa: 0.5}]", r"method\.kapa is not searched here\. Did you mean 'method\.kappa'"),
    ("[{method.kappa: high}]", r"method\.kappa must be a number, got the text 'high'"),
    ("[{train.batch_size: 100}]", r"train\.batch_size = 100 is none of the searched 64, 128"),
    ("[{model.width: 4.5}]", r"model\.width must be a whole number, got 4\.5"),
    ("[{method.kappa: 0.9}]", r"start\.0: .* does not meet method\.kappa < 0\.8 \(where\)"),
    ("best", r"start: must be"),
]


@pytest.mark.parametrize(("start", "message"), MISTAKES)
def test_a_point_outside_the_space_is_named(sweep_file, start, message):
    with pytest.raises(ConfigError, match=message):
        load(
            sweep_file,
            "search.train.batch_size={choice: [64, 128]}",
            "search.model.width={integer: [2, 6]}",
            "where=method.kappa < 0.8",
            f"start={start}",
        )
