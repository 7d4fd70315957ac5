"""The table of methods, the configs and the file names say the same."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

import dpsweep.methods
from dpsweep.core.types import Released
from dpsweep.filters.base import Public
from dpsweep.methods import METHODS, PUBLISHED, MethodConfig, build_method
from dpsweep.optim import OptimizerConfig
from dpsweep.privacy.query import NEWEST_ITERATE

every_entry = pytest.mark.parametrize("name", METHODS)

HELPERS = {"__init__", "base", "correlated", "lowpass", "momentum"}
"""Modules beside the methods' own, which several of them share."""

LOW_PASS = {
    "published": "a9_b1",
    "coefficients": None,
    "design": None,
    "poles": None,
    "zeros": None,
}
KALMAN = {"kappa": 0.7, "gamma": 0.5, "gain": "constant", "process": 0.5, "hessian": 0.1}
PAPER_VALUES = {
    "dp_sgd": {},
    "dp_adam": {},
    "dp_adambc": {},
    "doppler": {"filter": LOW_PASS},
    "disk": KALMAN,
    "fftkf": {
        **KALMAN,
        "cut": 0.5,
        "depth": 0.5,
        "shape": "step",
        "sharpness": 4.0,
        "scope": "model",
        "predictor": "joint",
        "split_share": 0.2,
    },
    "innerouter": {"points": 2, "decay": 0.3, "outer_decay": 0.9},
    "dp_pmlf": {"points": 2, "decay": 0.3, "filter": LOW_PASS},
    "spectral_dp": {"keep": 0.5},
    "block_spectral_dp": {"keep": 0.5, "keep_circulant": 0.25},
    "bandmf": {"bands": "auto", "coefficients": "optimal", "workload": "prefix"},
    "dp_ftrl": {"buffers": 2},
    "compose": {
        "compose": {"query": {"name": "here"}, "filters": (), "base": "sgd", "geometry": None}
    },
}
"""The papers' values, and ours where they leave one open."""


@every_entry
def test_key_is_the_configs_own_name(name):
    assert METHODS[name].config().name == name


def test_method_config_is_one_of_the_table_and_the_table_is_all_of_it():
    union, *_ = get_args(MethodConfig)
    assert set(get_args(union)) == {entry.config for entry in METHODS.values()}


def test_every_file_of_the_room_is_in_the_table():
    folder = Path(dpsweep.methods.__file__).parent
    files = {place.stem for place in folder.glob("*.py")}
    assert files - HELPERS == set(METHODS)
    assert files >= HELPERS


def test_twelve_methods_are_published_and_one_is_put_together_by_hand():
    assert len(PUBLISHED) == 12
    assert set(METHODS) - set(PUBLISHED) == {"compose"}


@every_entry
def test_config_read_by_name_alone_builds_its_entrys_method(name):
    config = TypeAdapter(MethodConfig).validate_python({"name": name})
    assert type(config) is METHODS[name].config
    assert build_method(config) == METHODS[name].build(config)


@every_entry
def test_config_is_the_same_after_a_journey_through_json(name):
    config = METHODS[name].config()
    read = TypeAdapter(MethodConfig).validate_json(config.model_dump_json())
    assert read == config
    assert hash(read) == hash(config)


@every_entry
def test_bases_are_known_optimizers(name):
    union, *_ = get_args(OptimizerConfig)
    known = {config.model_fields["name"].default for config in get_args(union)}
    assert METHODS[name].bases
    assert set(METHODS[name].bases) <= known


@pytest.mark.parametrize("step", [0, 1, 2, 50])
@every_entry
def test_weights_of_the_query_sum_to_one(name, step):
    method = build_method(METHODS[name].config())
    assert sum(ask.weight for ask in method.query.evaluation_points(step)) == pytest.approx(
        1, abs=1e-12
    )


@every_entry
def test_config_without_a_single_tunable_is_printed_values(name):
    assert METHODS[name].config().model_dump(exclude={"name"}) == PAPER_VALUES[name]


@every_entry
def test_unknown_tunable_is_refused(name):
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        METHODS[name].config(kapa=0.5)


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam", "dp_adambc", "bandmf", "dp_ftrl", "compose"])
def test_plain_methods_ask_here_and_filter_nothing(name):
    method = build_method(METHODS[name].config())
    assert method.query == NEWEST_ITERATE
    assert method.filters == ()
    assert method.geometry is None


@pytest.mark.parametrize("name", [name for name in METHODS if name != "innerouter"])
def test_constant_release_leaves_the_filters_whole(name):
    for out in filtered_twos(name):
        torch.testing.assert_close(out, torch.full_like(out, 2.0))


def test_constant_release_leaves_innerouter_as_a_growing_sum():
    # Its heavy ball is unnormalised: 1 + 0.9 + ... + 0.9^t times as long.
    for t, out in enumerate(filtered_twos("innerouter")):
        torch.testing.assert_close(out, torch.full_like(out, 2 * (1 - 0.9 ** (t + 1)) / 0.1))


def filtered_twos(name: str) -> list[torch.Tensor]:
    """What leaves the method's filters in its first steps, fed with nothing but twos."""
    chain = build_method(METHODS[name].config()).chain
    constant = Released({"w": torch.full((300,), 2.0)})
    state, outs = chain.init(constant), []
    for t in range(5):
        out, state = chain.apply(constant, state, Public(t, constant, 0.0))
        outs.append(out["w"])
    return outs
