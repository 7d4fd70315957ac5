"""The table of methods, the configs and the file names say the same."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

import dpsweep.methods
from dpsweep.core.types import Released
from dpsweep.filters.base import Public
from dpsweep.methods import METHODS, MethodConfig, build
from dpsweep.optim import OptimizerConfig
from dpsweep.privacy.query import HERE

every_entry = pytest.mark.parametrize("name", METHODS)


@every_entry
def test_key_is_the_configs_own_name(name):
    assert METHODS[name].config().name == name


def test_method_config_is_one_of_the_table_and_the_table_is_all_of_it():
    union, *_ = get_args(MethodConfig)
    assert set(get_args(union)) == {entry.config for entry in METHODS.values()}


def test_every_file_of_the_room_is_in_the_table():
    folder = Path(dpsweep.methods.__file__).parent
    files = {place.stem for place in folder.glob("*.py")}
    assert files - {"__init__", "base"} == set(METHODS)


@every_entry
def test_config_read_by_name_alone_builds_its_entrys_method(name):
    config = TypeAdapter(MethodConfig).validate_python({"name": name})
    assert type(config) is METHODS[name].config
    assert build(config) == METHODS[name].build(config)


@every_entry
def test_bases_are_known_optimizers(name):
    union, *_ = get_args(OptimizerConfig)
    known = {config.model_fields["name"].default for config in get_args(union)}
    assert METHODS[name].bases
    assert set(METHODS[name].bases) <= known


@every_entry
def test_weights_of_the_query_sum_to_one(name):
    method = build(METHODS[name].config())
    assert sum(ask.weight for ask in method.query) == pytest.approx(1, abs=1e-12)


@every_entry
def test_config_without_a_single_tunable_is_printed_values(name):
    printed = {"kappa": 0.7, "gamma": 0.5, "cut": 0.5, "depth": 0.5}
    given = METHODS[name].config().model_dump(exclude={"name"})
    assert given == {key: printed[key] for key in given}


@every_entry
def test_unknown_tunable_is_refused(name):
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        METHODS[name].config(kapa=0.5)


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adam"])
def test_plain_methods_ask_here_and_filter_nothing(name):
    method = build(METHODS[name].config())
    assert method.query == HERE
    assert method.filters == ()


@every_entry
def test_constant_release_leaves_the_filters_whole(name):
    chain = build(METHODS[name].config()).chain
    constant = Released({"w": torch.full((300,), 2.0)})
    state = chain.init(constant)
    for t in range(5):
        out, state = chain.apply(constant, state, Public(t, constant, 0.0))
        torch.testing.assert_close(out["w"], constant["w"])
