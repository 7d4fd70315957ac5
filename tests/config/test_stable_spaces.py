"""No point of a space, default or of designs, poles and zeros, is a filter that is unstable."""

import numpy as np
import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.filters.iir import Iir
from dpsweep.methods import PUBLISHED, build_method

POLES = (
    "method={name: doppler, filter: {poles: [{radius: 0.5}, {radius: 0.5}], "
    "zeros: [{radius: 1, angle: 3.14159}]}}"
)
SPACES = {
    "designs": [
        "method={name: doppler}",
        "search={method.filter: {one_of: [{design: {family: butterworth, order: {integer: [1, 4]}, "
        "cutoff: {log_uniform: [0.02, 0.95]}}}, {design: {family: chebyshev, order: {integer: "
        "[1, 4]}, cutoff: {log_uniform: [0.02, 0.95]}, ripple_db: {uniform: [0.1, 3]}}}]}}",
    ],
    "poles and zeros": [
        POLES,
        "search={method.filter.poles.0.radius: {uniform: [0, 0.99]}, "
        "method.filter.poles.0.angle: {uniform: [0, 1.5]}, "
        "method.filter.poles.1.radius: {uniform: [0, 0.99]}, "
        "method.filter.zeros.0.radius: {uniform: [0, 1]}, "
        "method.filter.zeros.0.angle: {uniform: [1.6, 3.14159]}}",
    ],
    "a pair that depends": [
        POLES,
        "search={method.filter.poles.0.radius: {uniform: [0, 0.99]}, method.filter.poles.0.angle: "
        "{uniform: [0, 1.5]}, method.filter.zeros.0.angle: {uniform: [1.6, 3.14159]}}",
    ],
}


def largest_pole(trial):
    """Of all the low-pass filters of a trial's method; 0 if it has none."""
    filters = [f for f in build_method(trial.method).filters if isinstance(f, Iir)]
    return max((abs(z) for f in filters for z in np.roots([1.0, *f.a])), default=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_thousand_points_of_a_space_of_filters_are_stable(sweep_file, space):
    trials = load_sweep(sweep_file, space).samples(1000)
    poles = [largest_pole(trial) for trial in trials]
    assert len(poles) == 1000
    assert max(poles) < 1
    assert max(poles) > 0.9  # the space goes near the edge, and not over it


@pytest.mark.parametrize("method", PUBLISHED)
def test_a_thousand_points_of_each_default_space_are_valid_and_stable(sweep_file, method):
    trials = load_sweep(sweep_file, [f"search={{each_of: [{method}]}}"]).samples(1000)
    assert len(trials) == 1000
    assert all(largest_pole(trial) < 1 for trial in trials)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ("method.filter.poles.0.radius: {uniform: [0, 1]}", r"must have a radius in \[0, 1\)"),
        (
            "method.filter.poles.0.radius: {uniform: [-0.5, 0.5]}",
            r"greater than or equal|at least 0",
        ),
        ("method.filter.zeros.0.angle: {uniform: [0, 1]}", r"zeros must keep away from z = 1"),
    ],
)
def test_a_space_that_reaches_over_the_edge_is_refused_before_a_trial(sweep_file, search, message):
    with pytest.raises(ConfigError, match=message):
        load_sweep(sweep_file, [POLES, f"search={{{search}}}"])
