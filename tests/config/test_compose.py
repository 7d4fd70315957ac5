"""A method of one's own is written in YAML, changed from the command line, and searched."""

import textwrap
from pathlib import Path

import pytest

from dpsweep.config.source import Source, parse_yaml
from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import TrialConfig, load_trial, resolve_trial_source
from dpsweep.core.errors import ConfigError
from dpsweep.filters.base import Chain
from dpsweep.filters.iir import Iir
from dpsweep.filters.lti import Ema, Momentum, Riccati
from dpsweep.filters.spectral import Shelf
from dpsweep.methods import build_method, compose
from dpsweep.methods.base import Method
from dpsweep.methods.disk import LookAhead
from dpsweep.privacy.geometry import Spectral
from dpsweep.privacy.query import NEWEST_ITERATE, EvaluationPoint, FixedQuery
from dpsweep.training.check import check_parts

TRIAL = """\
data: {name: digits}
model: {name: cnn_small}
privacy: {noise_multiplier: 1.0}
train: {batch_size: 100, epochs: 3}
optimizer: {lr: 0.5}
method:
  compose:
    query: {name: momentum, k: 3, beta: 0.5}
    filters:
      - name: shelf
        lambda: 0.4
        rho: 0.6
      - {name: low_pass, published: a6_b4}
      - {name: ema, gain: 0.5}
    base: adambc
"""


def source(*settings: str, text: str = TRIAL) -> Source:
    return resolve_trial_source(parse_yaml(text, "trial.yaml"), list(settings))


def load(*settings: str, text: str = TRIAL) -> TrialConfig:
    return load_trial(source(*settings, text=text))


def check(*settings: str) -> None:
    """As `dpsweep check` does, but for the data."""
    given = source(*settings)
    check_parts(load_trial(given), given)


def built(*settings: str) -> Method:
    return build_method(load(*settings).method)


def test_the_example_of_the_modules_first_lines_loads():
    rest = TRIAL.partition("method:")[0]
    lines = [line for line in compose.__doc__.splitlines() if line.startswith("    ")]
    example = textwrap.dedent("\n".join(lines))
    config = load(text=rest + example).method
    assert config.compose.base == "adambc"
    assert build_method(config).filters == (Shelf(0.5, 0.6),)


def test_parts_are_put_together_as_written():
    method = built()
    weights = [1 / 1.75, 0.5 / 1.75, 0.25 / 1.75]
    assert method.query == FixedQuery(
        tuple(EvaluationPoint(w, age=j) for j, w in enumerate(weights))
    )
    assert method.filters == (Shelf(0.4, 0.6), Iir((-0.6,), (0.4,)), Ema(0.5))
    assert method.geometry is None
    assert method.chain == Chain(method.filters)


PARTS = [
    ("query: {name: here}", Method(query=NEWEST_ITERATE)),
    ("query: {name: look_ahead, kappa: 0.3}", Method(query=LookAhead(Ema(0.3), 0.5))),
    (
        "query: {name: look_ahead, gain: riccati, gamma: one_point}",
        Method(query=LookAhead(Riccati(0.5, 0.1), None)),
    ),
    ("query: {name: momentum, points: 1}", Method(query=NEWEST_ITERATE)),
    ("filters: [{name: riccati, process: 0.2}]", Method(filters=(Riccati(0.2, 0.1),))),
    ("filters: [{name: momentum, decay: 0.5}]", Method(filters=(Momentum(0.5),))),
    (
        "filters: [{name: shelf, scope: tensor, shape: butterworth, sharpness: 2}]",
        Method(filters=(Shelf(0.5, 0.5, "butterworth", "tensor", 2.0),)),
    ),
    (
        "filters: [{name: low_pass, coefficients: {a: [-0.5], b: [0.5]}}]",
        Method(filters=(Iir((-0.5,), (0.5,)),)),
    ),
    ("geometry: {name: spectral}", Method(geometry=Spectral(0.5, 0.25))),
    ("geometry: {name: spectral, keep: 0.7}", Method(geometry=Spectral(0.7, 0.25))),
]


@pytest.mark.parametrize(("part", "method"), PARTS, ids=[part for part, _ in PARTS])
def test_each_part_is_built_from_its_name_and_numbers(part, method):
    assert built(f"method={{compose: {{{part}}}}}") == method


def test_method_name_may_be_left_out():
    named = TRIAL.replace("method:\n", "method:\n  name: compose\n")
    assert load(text=named) == load()
    assert load().method.name == "compose"


def test_base_is_the_optimizer_and_its_numbers_stand_there():
    config = load("optimizer={lr: 0.1, floor: 1e-6}")
    assert (config.optimizer.name, config.optimizer.floor) == ("adambc", 1e-6)
    assert load("method.compose.base=adamw").optimizer.name == "adamw"
    named = TRIAL.replace("method:\n", "method:\n  name: compose\n")
    assert load(text=named).optimizer.name == "adambc"
    assert load("method={name: compose}").optimizer.name == "sgd"


def test_config_is_the_same_after_a_journey_through_json():
    for config in (load(), load("method={name: compose}")):
        assert TrialConfig.model_validate_json(config.model_dump_json()) == config
        assert TrialConfig.model_validate(config.model_dump(mode="json")) == config


def test_letters_stand_for_names_inside_the_list_and_out():
    by_name = TRIAL.replace("lambda", "cut").replace("rho", "depth")
    assert load(text=by_name.replace("k: 3, beta", "points: 3, decay")) == load()


@pytest.mark.parametrize("key", ["depth", "rho"])
def test_one_number_of_a_filter_can_be_set_from_the_command_line(key):
    config = load(f"method.compose.filters.0.{key}=0.3")
    assert config.method.compose.filters[0].depth == 0.3
    assert config.method.compose.filters[0].cut == 0.4  # the rest is as it was
    assert config.method.compose.filters[1:] == load().method.compose.filters[1:]


MISTAKES = [
    (
        ["optimizer.name=sgd"],
        r"--set optimizer\.name: compose steps with adambc, got sgd\. Delete optimizer\.name",
    ),
    (
        ["method.compose.filters.3.depth=0.3"],
        r"--set method\.compose\.filters\.3\.depth: filters is a list of 3, counted from 0, and "
        r"'3' is none of them",
    ),
    (["method.compose.filters.first.depth=0.3"], r"'first' is none of them"),
    (
        ["method.compose.filters.0.depth=1"],
        r"--set method\.compose\.filters\.0\.depth: must be less than 1.*got 1\. Share of",
    ),
    (
        ["method.compose.filters=[{name: shelv}]"],
        r"method\.compose\.filters\.0\.name: unknown filter 'shelv'\. Did you mean 'shelf'\?",
    ),
    (
        ["method.compose.filters=[{name: shelf, depht: 1}]"],
        r"method\.compose\.filters\.0\.depht: unknown key\. Did you mean 'depth'\?",
    ),
    (
        ["method.compose.filters=[{cut: 0.5}]"],
        r"method\.compose\.filters\.0: needs a name, got .*: ema, riccati, shelf, low_pass",
    ),
    (["method.compose.filters={name: ema}"], r"method\.compose\.filters: must be a list, got"),
    (
        ["method.compose.query.name=now"],
        r"method\.compose\.query\.name: unknown query 'now'\.",
    ),
    (["method.compose.base=lion"], r"method\.compose\.base: must be one of 'sgd', 'adam'"),
    (["method.compose.parts=3"], r"method\.compose\.parts: unknown key\. .*Known: base, filters"),
    (
        ["method.compose.query={name: look_ahead, gamma: 0}"],
        r"method\.compose\.query\.gamma: must not be 0, got 0",
    ),
    (
        ["method.compose.filters=[{name: riccati, process: 0}]"],
        r"method\.compose\.filters\.0\.process: must be at least 1e-06",
    ),
    (
        ["method={compose: {geometry: {name: spectral}}}"],
        r"trial\.yaml:2: model: cnn_small does not fit method compose: layer '7' is a plain Linear",
    ),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_mistake_names_key_value_and_remedy(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check(*settings)
    assert "\n" not in str(caught.value), "one mistake, one line"


def test_a_mistake_in_a_list_is_told_with_its_own_line():
    with pytest.raises(ConfigError, match=r"trial\.yaml:12: method\.compose\.filters\.0\.depth: "):
        load(text=TRIAL.replace("rho: 0.6", "rho: 1.6"))
    with pytest.raises(ConfigError, match=r"trial\.yaml:14: method\.compose\.filters\.2\.gain: "):
        load(text=TRIAL.replace("gain: 0.5", "gain: 0"))


# As a sweep.


def sweep_file(folder: Path, search: str) -> Path:
    indented = "".join(f"  {line}\n" for line in TRIAL.splitlines())
    text = f"name: parts\nbase:\n{indented}search:\n{search}\nbudget: {{trials: 3}}\n"
    (folder / "sweep.yaml").write_text(text)
    return folder / "sweep.yaml"


@pytest.mark.parametrize("key", ["depth", "rho"])
def test_one_number_of_a_filter_is_searched(key, tmp_path):
    search = f"  method.compose.filters.0.{key}: {{uniform: [0.1, 0.9]}}"
    sweep = load_sweep(sweep_file(tmp_path, search))
    found = [trial.method.compose for trial in sweep.corners]
    assert {parts.filters[0].depth for parts in found} == {0.1, 0.9}
    assert {parts.filters[0].cut for parts in found} == {0.4}
    assert {len(parts.filters) for parts in found} == {3}


def test_whole_parts_are_searched(tmp_path):
    search = """\
  method.compose.query: {choice: [{name: here}, {name: momentum, k: 4}]}
  method.compose.filters: {choice: [[], [{name: shelf, rho: 0.2}], [{name: ema, gain: 0.1}]]}"""
    sweep = load_sweep(sweep_file(tmp_path, search))
    methods = {build_method(trial.method) for trial in sweep.corners}
    assert {len(method.filters) for method in methods} == {0, 1}
    assert {method.query.memory for method in methods} == {1, 4}
    assert Shelf(0.5, 0.2) in {link for method in methods for link in method.filters}


def test_mistake_of_a_searched_number_names_the_search_line(tmp_path):
    search = "  method.compose.filters.0.depth: {uniform: [0.1, 1.0]}"
    with pytest.raises(
        ConfigError, match=r"sweep\.yaml:19: search\.method\.compose\.filters\.0\.depth: must be"
    ):
        load_sweep(sweep_file(tmp_path, search))
